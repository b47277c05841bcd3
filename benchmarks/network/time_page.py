"""The tables and the picture of the time to loss, from the results, as one page."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.network import losses, timings
from benchmarks.network.losses import (
    DENSE,
    EXCHANGES,
    HIDDEN,
    Results,
    Setting,
    Trial,
    last,
)
from benchmarks.network.time_picture import picture
from benchmarks.network.timings import TIMED, Link
from benchmarks.train.page import markdown
from benchmarks.train.search import swept
from benchmarks.train.tables import variant_of
from benchmarks.train.tasks import parameters, task
from examples.common.tables import spread, table

Rows = list[dict[str, str]]
ABOUT = """\
`python -m benchmarks.network.time_to_loss` measures the seconds until the last loss of
dense AdamW, whose gradients are averaged in bfloat16 by one all-reduce. No link changes
the loss after a number of steps: loss against steps is of simulated workers, the mean
over three seeds, on the schedule that reaches the target soonest. The seconds of a step
are medians over 40 steps or more, on each link, of jax processes in network namespaces
that share the cores; compilation does not count. Their product is the time. The last
table trains some methods to the end on one link, and says how far the product is off.
Bytes are those of each worker, by the counters of its interface, without headers;
"reported" are those of the wire report.
"Advised" is what `slamb_jax.advise` says of the same steps, given their seconds on
links without a limit, the link without headers, and twice the latency of a small
message, since Gloo asks the receiver before it sends a large one.
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


def numbers(
    setting: Setting, method: str, link: Link, results: Results
) -> dict[str, float]:
    """What is known of a method on a link: of a step, and of all to the target."""
    own, dense = (timings.pace(setting, x, link, results) for x in (method, DENSE))
    steps, dense_steps = (losses.steps_of(setting, x, results) for x in (method, DENSE))
    found = {"step": 1e3 * own.step, "counters": own.sent / own.reported} if own else {}
    if own and steps and dense and dense_steps:
        sent = own.sent * own.exchanges(steps)
        found |= {"steps": steps, "seconds": own.seconds(steps), "sent": sent / 1e6}
        found["share"] = sent / (dense.sent * dense_steps)
        found["faster"] = dense.seconds(dense_steps) / found["seconds"]
        if method in EXCHANGES:
            advice = timings.advice(setting, method, link, results)
            found["advised"] = advice.speedup_bfloat16 * dense_steps / steps
            found["off"] = 100 * (found["advised"] / found["faster"] - 1)
    return found


COLUMNS = {  # of a link's table: which number, and how it is written
    "ms a step": ("step", "{:.0f}"),
    "steps": ("steps", "{:.0f}"),
    "seconds": ("seconds", "{:.1f}"),
    "MB sent": ("sent", "{:.1f}"),
    "of bfloat16": ("share", "{:.3f}"),
    "sent / reported": ("counters", "{:.3f}"),
    "times as fast": ("faster", "{:.2f}"),
    "advised": ("advised", "{:.2f}"),
    "off": ("off", "{:+.0f} %"),
}


def written(found: dict[str, float], column: str) -> str:
    name, form = COLUMNS[column]
    return form.format(found[name]) if name in found else "-"


def link_table(setting: Setting, link: Link, results: Results) -> Rows:
    """All methods on one link."""
    rows = []
    for method in (DENSE, HIDDEN, *EXCHANGES):
        if found := numbers(setting, method, link, results):
            cells = {column: written(found, column) for column in COLUMNS}
            rows.append({"method": method} | cells)
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
            found, name = numbers(setting, method, link, results), variant_of(method)
            seconds[-1][name] = written(found, "seconds")
            if method in EXCHANGES:
                both = [written(found, x) for x in ("times as fast", "advised")]
                ratio[-1][name] = f"{both[0]} ({both[1]})" if "off" in found else "-"
    return seconds, ratio


def checked_table(setting: Setting, link: Link, results: Results) -> Rows:
    """Whole trainings on one link, beside the product of steps and seconds."""
    rows = []
    for method in losses.TO_THE_END:
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
    keys = [timings.key("steps", setting, x, y) for x in TIMED for y in links]
    machines = {x["hardware"] for key in keys if (x := results.get(key))}
    shown = f"![Seconds to the loss, on each link]({image.name})"
    tables = [markdown(table(name, rows)) for name, rows in sections if rows]
    parts = ["# Time to loss", ABOUT, shown, *tables, f"{'; '.join(sorted(machines))}."]
    path.write_text("\n\n".join(parts) + "\n")
    return path
