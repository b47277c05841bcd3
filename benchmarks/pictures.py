"""The look of all pictures, and of labels beside points.

All are 5.4 inches wide on white, with 11 points: on a telephone of 360 pixels a letter
then has 10 of them, and a dark page does not take the ink.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

WIDTH, DPI = 5.4, 160
INK = "#1f2328"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d8dee4",
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "savefig.dpi": DPI,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color"), INK
    ),
    "ytick.color": INK,
}
COLORS = {
    "AdamW": INK,  # dense
    "LAMB": "#8a5a00",
    "Muon": "#5c636a",
    "exchange": "#0067b1",
    "outer": "#00805c",
    "SLAMB": "#c43c00",
    "DiLoCo": "#8f3a97",
    "rival": "#8a6d3b",
}


@contextlib.contextmanager
def drawing(path: Path, height: float, **how: Any) -> Iterator[tuple[Any, Any]]:
    """A figure and its panels, which are saved in the end."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(figsize=(WIDTH, height), **how)
        yield figure, panels
        figure.savefig(path)
        plt.close(figure)


def title(figure: Any, first: str, *rest: str) -> None:
    """What is shown, and lines below it of which sizes; from the left edge."""
    lines = figure.suptitle("\n".join((first, *rest)), x=0.01, ha="left", fontsize=11)
    lines.set_linespacing(1.3)


def label(panel: Any, text: str, point: Any, offset: Any, color: str) -> None:
    """A text whose near corner, or side, is so many points away from a point."""
    across, up = offset
    panel.annotate(
        text, point[:2], offset, textcoords="offset points", color=color,
        ha="left" if across > 0 else "right" if across < 0 else "center",
        va="bottom" if up > 0 else "top" if up < 0 else "center",
    ).set_in_layout(False)  # fmt: skip
