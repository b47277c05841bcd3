"""Tables with spreads and pictures, from the results as far as there are any."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from rich.table import Table

from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import DENSE, METHODS
from benchmarks.frontier.results import Results, last_loss
from benchmarks.frontier.run import timing_key
from benchmarks.frontier.seconds import LINKS, exchange_seconds
from benchmarks.frontier.sweep import finished
from benchmarks.frontier.tasks import task
from benchmarks.rivals import wire_bytes


def sent_bytes(point: dict[str, Any], workers: int) -> float:
    """Bytes each worker has sent by a point of a run."""
    return sum(
        often * wire_bytes([(kind, payload)], workers)
        for kind, payload, often in point["exchanges"]
    )


def total_bytes(found: list[dict[str, Any]]) -> float:
    """Bytes each worker has sent in the end; of every seed as many."""
    return sent_bytes(found[0]["points"][-1], found[0]["key"]["workers"])


def step_seconds(setting: Setting, method: str, results: Results) -> float:
    """Of a simulated step: as timed beside LAMB's, else as in the runs.

    A machine is not as fast every day, so the time is LAMB's own times the ratio.
    """
    timed, dense = (results.get(timing_key(setting, name)) for name in (method, DENSE))
    if timed is None:
        runs = finished(setting, method, results)
        return statistics.median(run["step_seconds"] for run in runs)
    took: float = timed["step_seconds"]
    if dense is None or "dense_seconds" not in timed:
        return took
    return took / timed["dense_seconds"] * dense["step_seconds"]


def seconds(per_step: float, point: dict[str, Any], workers: int, link: float) -> float:
    """Wall time by a point: compute and update, then the exchange.

    A worker's compute and update are its share of the simulated step, which takes
    ``per_step`` seconds on the machine that simulated it.
    """
    compute = point["step"] * per_step / workers
    return compute + sum(
        often * exchange_seconds([(kind, payload)], workers, link)
        for kind, payload, often in point["exchanges"]
    )


def table(setting: Setting, results: Results) -> Table:
    rows = {method: finished(setting, method, results) for method in METHODS}
    done = {method: found for method, found in rows.items() if found}
    machines = {r["hardware"] for found in done.values() for r in found}
    out = Table(
        title=f"{setting.task}, {setting.workers} workers x {setting.batch}, "
        f"{setting.steps} steps; loss in {task(setting.task).unit}",
        caption="; ".join(sorted(machines))
        + "; ± is the deviation over seeds; seconds at each link",
    )
    heads = (
        *("method", "rate", "seeds", "loss", "above LAMB, %", "MiB sent", "share"),
        *LINKS,
    )
    for head in heads:
        out.add_column(head, justify="left" if head == "method" else "right")
    dense = done.get(DENSE)
    for method, found in done.items():
        sent = total_bytes(found)
        share = above = ""
        if dense is not None:
            share = f"{sent / total_bytes(dense):.4f}"
            above = f"{100 * (mean_loss(found) / mean_loss(dense) - 1):+.1f}"
        per_step = step_seconds(setting, method, results)
        last = found[0]["points"][-1]
        times = (
            seconds(per_step, last, setting.workers, link) for link in LINKS.values()
        )
        out.add_row(
            method,
            f"{found[0]['key']['rate']:g}",
            str(len(found)),
            spread(losses(found)),
            above,
            f"{sent / 2**20:.2f}",
            share,
            *(f"{t:.3g}" for t in times),
        )
    return out


def losses(found: list[dict[str, Any]]) -> list[float]:
    """The last evaluation loss of each."""
    return [last_loss(result) for result in found]


def mean_loss(found: list[dict[str, Any]]) -> float:
    """The last evaluation loss, over seeds."""
    return statistics.fmean(losses(found))


def spread(values: list[float]) -> str:
    mean = statistics.fmean(values)
    if mean == float("inf"):
        return "diverged"
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{mean:.3f}{deviation}"


def picture(setting: Setting, results: Results, path: Path) -> bool:
    """Loss against bytes, and against seconds on each link; False with no results."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    done = {m: found for m in METHODS if (found := finished(setting, m, results))}
    if not done:
        return False
    figure, panels = plt.subplots(
        1, 1 + len(LINKS), figsize=(18, 4.5), sharey=True, layout="constrained"
    )
    workers = setting.workers
    for i, method in enumerate(METHODS):
        if method not in done:
            continue
        found = done[method]
        colors = plt.get_cmap("tab20")
        style = {"label": method, "color": colors(i % 20), "marker": "o"}
        style |= {"linestyle": "-" if i < 20 else "--"}
        style |= {"markersize": 3, "linewidth": 2.5 if "SLAMB" in method else 1}
        # To the end of the shortest: a run that diverged has fewer.
        every = zip(*(r["points"] for r in found), strict=False)
        points = [list(same) for same in every]
        means = [_mean([p["loss"] for p in same]) for same in points]
        sent = [sent_bytes(same[0], workers) / 2**20 for same in points]
        panels[0].plot(sent, means, **style)
        per_step = step_seconds(setting, method, results)
        for panel, link in zip(panels[1:], LINKS.values(), strict=True):
            times = [seconds(per_step, same[0], workers, link) for same in points]
            panel.plot(times, means, **style)
    panels[0].set(xlabel="MiB sent by each worker", ylabel=task(setting.task).unit)
    low, high = panels[0].dataLim.intervaly
    if low < high / 10:  # a loss that goes to 0
        panels[0].set_yscale("log")  # the others share it
    for panel, name in zip(panels[1:], LINKS, strict=True):
        panel.set(xlabel=f"seconds at {name}")
    for panel in panels:
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter("")
        panel.grid(alpha=0.3, which="both")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside right center", fontsize=8)
    figure.suptitle(str(setting))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _mean(losses: list[float | None]) -> float:
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else float("nan")
