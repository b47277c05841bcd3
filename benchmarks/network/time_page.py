"""The tables and the picture of the time to loss, from the results, as one page."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from benchmarks.network import losses, timings
from benchmarks.network.learner import BUCKETS
from benchmarks.network.losses import DENSE, EXCHANGES
from benchmarks.network.time_picture import picture
from benchmarks.network.timings import HIDDEN, TIMED, Link
from benchmarks.train.page import markdown
from benchmarks.train.results import Results, last
from benchmarks.train.search import swept
from benchmarks.train.tables import variant_of
from benchmarks.train.tasks import parameters, task
from benchmarks.train.trials import Setting, Trial
from examples.common.tables import spread, table

Rows = list[dict[str, str]]
ABOUT = """\
`python -m benchmarks.network.time_to_loss` measures the seconds until the last loss of
dense AdamW, whose gradients are averaged in bfloat16 by one all-reduce. No link changes
the loss after a number of steps: loss against steps is of simulated workers, the mean
over three seeds, on the schedule that reaches the target soonest. The seconds of a step
are medians over 40 steps or more, on each link, of jax processes in network namespaces
that share the cores; compilation does not count. Their product is the time. The last
table trains all methods to the end on one link, and says how far the product is off.
Bytes are those of each worker, by the counters of its interface, without headers.
"Advised" is what `slamb_jax.advise` says of the same steps, given the seconds of a step
with nothing sent, the link without headers, and twice the latency of a small message,
since Gloo asks the receiver before it sends a large one.
"""


def losses_table(setting: Setting, results: Results) -> Rows:
    """The runs behind the curves."""
    rows = []
    for method in losses.METHODS:
        runs = losses.best(setting, method, results)
        steps = losses.steps_of(setting, method, results)
        rows.append(
            {
                "method": method,
                "rate": f"{runs[0]['key']['rate']:g}",
                "tuned in": f"{len(swept(Trial(setting, method), results))} runs",
                "schedule": f"{runs[0]['key']['steps']} steps",
                "seeds": str(len(runs)),
                "last loss": spread([last(run) for run in runs]),
                "steps to the target": f"{steps:.0f}" if steps else "not reached",
            }
        )
    return rows


def ratios(
    setting: Setting, method: str, link: Link, results: Results
) -> tuple[float, float] | None:
    """How many times as fast as dense, measured and advised; None: not reached."""
    steps, dense_steps = (losses.steps_of(setting, x, results) for x in (method, DENSE))
    own, dense = (timings.pace(setting, x, link, results) for x in (method, DENSE))
    if not (steps and dense_steps and own and dense):
        return None
    if method not in EXCHANGES:
        dense_advised = own_advised = 1.0
    else:
        dense_advised, own_advised = timings.advised(setting, method, link, results)
    measured = dense.seconds(dense_steps) / own.seconds(steps)
    return measured, dense_steps * dense_advised / (steps * own_advised)


def link_table(setting: Setting, link: Link, results: Results) -> Rows:
    """All methods on one link."""
    rows = []
    dense = timings.pace(setting, DENSE, link, results)
    dense_steps = losses.steps_of(setting, DENSE, results)
    for method in (DENSE, BUCKETS, HIDDEN, *EXCHANGES):
        own = timings.pace(setting, method, link, results)
        if own is None or dense is None or dense_steps is None:
            continue
        steps = losses.steps_of(setting, method, results)
        row = {"method": method, "ms a step": f"{1e3 * own.step:.0f}"}
        row |= dict.fromkeys(("steps", "seconds", "MB sent", "of bfloat16"), "-")
        row |= dict.fromkeys(("of float32", "times as fast", "advised", "off"), "-")
        if steps and (found := ratios(setting, method, link, results)):
            sent = own.sent * own.exchanges(steps)
            share = sent / (dense.sent * dense_steps)
            row |= {
                "steps": f"{steps:.0f}",
                "seconds": f"{own.seconds(steps):.1f}",
                "MB sent": f"{sent / 1e6:.1f}",
                "of bfloat16": f"{share:.3f}",
                "of float32": f"{share / 2:.3f}",
                "times as fast": f"{found[0]:.2f}",
            }
            if method in EXCHANGES:
                row["advised"] = f"{found[1]:.2f}"
                row["off"] = f"{100 * (found[1] / found[0] - 1):+.0f} %"
        rows.append(row)
    return rows


def overview(
    setting: Setting, links: Sequence[Link], results: Results
) -> tuple[Rows, Rows]:
    """Of each link the seconds to the target; how many times as fast, as advised."""
    seconds: Rows = []
    ratio: Rows = []
    for link in links:
        seconds.append({"link": str(link)})
        ratio.append({"link": str(link)})
        for method in losses.METHODS:
            known = timings.seconds_of(setting, method, link, results)
            seconds[-1][variant_of(method)] = f"{known:.1f}" if known else "-"
            if method in EXCHANGES:
                found = ratios(setting, method, link, results)
                both = f"{found[0]:.2f} ({found[1]:.2f})" if found else "-"
                ratio[-1][variant_of(method)] = both
    return seconds, ratio


def compared(
    setting: Setting, links: Sequence[Link], results: Results, recorded: Results
) -> Rows:
    """Of each link the seconds to the target in two files of results."""
    rows = []
    for link, method in itertools.product(links, losses.METHODS):
        new, old = (
            timings.seconds_of(setting, method, link, x) for x in (results, recorded)
        )
        row = {
            "link": str(link),
            "method": method,
            "seconds": f"{new:.1f}" if new else "-",
        }
        row["recorded"] = f"{old:.1f}" if old else "-"
        row["off"] = f"{100 * (new / old - 1):+.0f} %" if new and old else "-"
        rows.append(row)
    return rows


def checked_table(setting: Setting, link: Link, results: Results) -> Rows:
    """Whole trainings on one link, beside the product of steps and seconds."""
    rows = []
    for method in losses.METHODS:
        found = results.get(timings.key("training", setting, method, link))
        pace = timings.pace(setting, method, link, results)
        if found is None or pace is None:
            continue
        measured, predicted = sum(found["seconds"]), pace.seconds(setting.steps)
        simulated = losses.finished(Trial(setting, method), results)[0]
        rows.append(
            {
                "method": method,
                "seconds": f"{measured:.1f}",
                "steps x seconds": f"{predicted:.1f}",
                "off": f"{100 * (predicted / measured - 1):+.1f} %",
                "loss": f"{found['points'][-1][1]:.3f}",
                "simulated": f"{last(simulated):.3f}",
                "compile, s": f"{found['compile_seconds']:.0f}",
            }
        )
    return rows


def write_page(
    setting: Setting, links: Sequence[Link], checked: Link, results: Results
) -> Path:
    """Writes the page and its picture beside the results."""
    path = results.path.with_suffix(".md")
    image = path.with_suffix(".png")
    picture(setting, links, results, image)
    loss = losses.target(setting, results)
    model = f"{setting.task}, {parameters(setting.task):,} parameters"
    title = f"{model}, {setting.workers} workers x {setting.batch}"
    seconds, ratio = overview(setting, links, results)
    sections: list[tuple[str, Rows]] = [
        (f"Seconds to a loss of {loss:.3f}", seconds),
        ("How many times as fast as dense AdamW in bfloat16 (as advised)", ratio),
        (
            f"{title}: loss in {task(setting.task).unit}; the target is {loss:.3f}",
            losses_table(setting, results),
        ),
        *((str(link), link_table(setting, link, results)) for link in links),
        (
            f"To the end, {setting.steps} steps from seed 0 on {checked}",
            checked_table(setting, checked, results),
        ),
    ]
    machines = {
        found["hardware"]
        for link in links
        for method in TIMED
        if (found := results.get(timings.key("steps", setting, method, link)))
    }
    parts = [
        "# Time to loss",
        ABOUT,
        f"![Seconds to the loss, on each link]({image.name})",
    ]
    parts += [markdown(table(name, rows)) for name, rows in sections if rows]
    parts.append(f"{'; '.join(sorted(machines))}.")
    path.write_text("\n\n".join(parts) + "\n")
    return path
