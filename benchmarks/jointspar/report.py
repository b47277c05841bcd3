"""The tables and the pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from rich.table import Table

from benchmarks.jointspar.step import Row


def step_table(rows: Sequence[Row], title: str, machine: str) -> Table:
    out = Table(
        title=title,
        caption="active: the share of the layers that were; possible: the share of the "
        "dense step that the inactive layers' weight gradients and updates are, measured "
        f"on a program without any, and in brackets by FLOPs. {machine}",
    )
    heads = (
        "model",
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
        out.add_column(head, justify="left" if head == "model" else "right")
    for r in rows:
        whole = r.active == 1
        by_flops = (1 - r.active) * r.flops_share
        out.add_row(
            r.model,
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
    models = list(dict.fromkeys(r.model for r in rows))
    figure, panels = pyplot.subplots(
        1, len(models), figsize=(4.5 * len(models), 3.4), layout="constrained"
    )
    for axes, model in zip(panels, models, strict=True):
        here = sorted((r for r in rows if r.model == model), key=lambda r: r.active)
        floor = here[0].frozen_seconds / here[0].dense_seconds
        axes.plot([0, 1], [floor, 1], "k--", label="possible, measured")
        axes.plot(
            [0, 1], [1 - here[0].flops_share, 1], "k:", label="possible, by FLOPs"
        )
        steps = [r.seconds / r.dense_seconds for r in here]
        axes.plot([r.active for r in here], steps, "o-", label="JointSpar-LARS")
        axes.set(title=model, xlabel="share of layers active", ylabel="/ dense LARS")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
