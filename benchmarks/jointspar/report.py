"""The tables and the pictures."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.table import Table

from benchmarks.frontier.report import spread
from benchmarks.jointspar.step import Row
from benchmarks.jointspar.training import Run


def step_table(rows: Sequence[Row], title: str, machine: str) -> Table:
    out = Table(
        title=title,
        caption="active: the share of the layers that were; possible: the share of the "
        "dense step that the inactive layers' weight gradients and updates are, on a "
        f"program without any (measured; by FLOPs). {machine}",
    )
    heads = (
        "clock",
        "D",
        "s",
        "active",
        "ms",
        "/ dense",
        "saved",
        "possible",
        "realised",
    )
    for head in heads:
        out.add_column(head, justify="right")
    for r in rows:
        whole = r.active == 1
        by_flops = (1 - r.active) * r.flops_share
        out.add_row(
            r.clock,
            str(r.layers),
            f"{r.budget:g}",
            f"{r.active:.2f}",
            f"{r.seconds * 1e3:.1f}",
            f"{r.seconds / r.dense_seconds:.3f}",
            f"{1 - r.seconds / r.dense_seconds:.3f}",
            f"{r.possible_seconds / r.dense_seconds:.3f} ({by_flops:.3f})",
            "" if whole else f"{r.realised:.0%}",
        )
    return out


def step_picture(rows: Sequence[Row], path: Path) -> None:
    """Steps over the share of active layers, above the line of what is possible."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(5, 3.4), layout="constrained")
    here = sorted((r for r in rows if r.clock == "CPU"), key=lambda r: r.active)
    floor = here[0].frozen_seconds / here[0].dense_seconds
    axes.plot([0, 1], [floor, 1], "k--", label="possible, measured")
    by_flops = 1 - here[0].flops_share
    axes.plot([0, 1], [by_flops, 1], "k:", label="possible, by FLOPs")
    steps = [r.seconds / r.dense_seconds for r in here]
    axes.plot([r.active for r in here], steps, "o-", label="JointSpar-LARS")
    axes.set(xlabel="share of layers active", ylabel="CPU time / dense LARS")
    axes.set(title=here[0].model)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def training_table(found: Sequence[Sequence[Run]], title: str, machine: str) -> Table:
    """A row a method; losses with their deviation over the seeds."""
    out = Table(title=title, caption=f"± is the deviation over seeds. {machine}")
    heads = "method", "rate", "active", "loss", "MiB sent", "/ dense", "ms a step"
    for head in heads:
        out.add_column(head, justify="left" if head == "method" else "right")
    dense = found[0][0].sent[-1]
    for runs in found:
        first = runs[0]
        times = [r.seconds[-1] / r.steps[-1] * 1e3 for r in runs]
        out.add_row(
            first.method,
            f"{first.rate:g}",
            f"{first.active:.2f}",
            spread([r.losses[-1] for r in runs]),
            f"{first.sent[-1] / 2**20:.2f}",
            f"{first.sent[-1] / dense:.3f}",
            f"{statistics.median(times):.1f}",
        )
    return out


def training_picture(found: Sequence[Sequence[Run]], unit: str, path: Path) -> None:
    """Loss against bytes and against seconds, the first seed's run of each method."""
    pyplot = _pyplot()
    figure, (by_bytes, by_time) = pyplot.subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for runs in found:
        r = runs[0]
        by_bytes.plot([x / 2**20 for x in r.sent], r.losses, "o-", label=r.method)
        by_time.plot(r.seconds, r.losses, "o-", label=r.method)
    by_bytes.set(xlabel="MiB sent by each worker", ylabel=f"{found[0][0].task}, {unit}")
    by_time.set(xlabel="seconds in steps, nothing between the workers")
    for axes in (by_bytes, by_time):
        axes.set(xscale="log")
        axes.grid(alpha=0.3, which="both")
    by_time.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
