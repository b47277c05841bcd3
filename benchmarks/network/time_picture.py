"""The picture of the time to loss."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.patches import Patch

from benchmarks.network import losses, timings
from benchmarks.network.losses import DENSE, Results, Setting
from benchmarks.network.timings import Link
from benchmarks.pictures import COLORS, INK, drawing, label, title
from benchmarks.train.tasks import parameters

BAR = 0.18  # the width of a bar, of a link's place
BARS = {  # of the picture: a name for readers, its color, and that of its number
    "adamw, H 1": ("AdamW + exchange", COLORS["exchange"], "white"),
    "adamw, to all": ("the same, to all", "#7fb3d8", INK),
    "adamw, outer, H 10, outer 1 0.5": (
        "quantized outer step, H 10", COLORS["outer"], "white",
    ),
    "DiLoCo, H 10, outer 0.7 0.5": ("DiLoCo, H 10", COLORS["DiLoCo"], "white"),
    "DiLoCo, H 30, outer 0.7 0.5": ("DiLoCo, H 30", "#d3a9d8", INK),
}  # fmt: skip


def picture(
    setting: Setting, links: Sequence[Link], results: Results, path: Path
) -> None:
    """Seconds to the target on each link as bars, dense as a line across them."""
    trips = list(dict.fromkeys(link.round_trip for link in links))
    with drawing(path, 1.9 + 2 * len(trips), nrows=len(trips), squeeze=False) as (
        figure,
        panels,
    ):
        for panel, trip in zip(panels.flat, trips, strict=True):
            here = [link for link in links if link.round_trip == trip]
            for at, link in enumerate(here):
                top = 0.0
                for i, (method, (_, color, ink)) in enumerate(BARS.items()):
                    if known := timings.seconds_of(setting, method, link, results):
                        x = at + (i - len(BARS) / 2 + 0.5) * BAR
                        panel.bar(x, known, 0.92 * BAR, color=color)
                        panel.annotate(
                            f"{known:.0f}", (x, 0), (0, 3), color=ink, fontsize=10,
                            textcoords="offset points", ha="center",
                        )  # fmt: skip
                        top = max(top, known)
                if dense := timings.seconds_of(setting, DENSE, link, results):
                    panel.hlines(dense, at - 0.47, at + 0.47, INK, linewidth=2)
                    above = at, max(top, dense)
                    label(panel, f"dense {dense:.0f}", above, (0, 2), INK)
            panel.set_xticks(range(len(here)), [f"{x.mbit:g} Mbit/s" for x in here])
            panel.tick_params(axis="x", length=0)
            panel.grid(visible=False, axis="x")
            panel.margins(x=0.02, y=0.18)
            panel.set(title=f"round trip of {trip:g} ms", ylabel="seconds")
        handles = [Patch(color=color, label=name) for name, color, _ in BARS.values()]
        figure.legend(handles=handles, loc="outside lower left", ncols=2)
        size = f"{setting.workers} workers x {setting.batch} sequences"
        title(
            figure, f"Seconds to a loss of {losses.target(setting, results):.3f}",
            f"transformer of {parameters(setting.task):,} parameters, {size};",
            "line: dense AdamW in bfloat16",
        )  # fmt: skip
