"""The pictures of the frontier: losses by bytes, by setting and by size."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax

from benchmarks import few_bits
from benchmarks.frontier.grid import NOISY, Setting
from benchmarks.frontier.methods import DENSE
from benchmarks.frontier.report import Cell, Cells, half_interval, variant_of
from benchmarks.frontier.results import Results
from benchmarks.frontier.scale import COMPARED, gaps, line, parameters
from benchmarks.frontier.tasks import task
from benchmarks.pictures import COLORS, INK, drawing, label, title

Point = tuple[float, float, float]  # x, y, and half the interval of y
SHORT = ", b1 0.8"
REFERENCES = DENSE, DENSE + SHORT  # the first that was run is what others are beside
WIDEST = 20.0  # per cent: wider intervals run out of the picture
TICKS = {10.0**-i: f"1/{10**i}" for i in (3, 2, 1)} | {1 / 2: "1/2", 1.0: "1"}
BACKED: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
NAMES = {  # of a method without its outer step: what a reader calls it, and its color
    "AdamW, b1 0.8": ("AdamW, dense, b1 0.8", "AdamW"),
    "LAMB": ("LAMB, dense", "LAMB"),
    "Muon": ("Muon, dense", "Muon"),
    "adamw, H 1": ("AdamW + exchange", "exchange"),
    "adamw, b1 0.8, H 1": ("AdamW + exchange, b1 0.8", "exchange"),
    "adamw, 4 bits, H 1": ("exchange, 4 bits", "exchange"),
    "adamw, largest of 7": ("exchange, largest of 7", "exchange"),
    "adamw, largest of 31": ("exchange, largest of 31", "exchange"),
    "adamw, outer, H 10": ("quantized outer step, H 10", "outer"),
    "muon, 8 bits": ("Muon + exchange, 8 bits", "Muon"),
    "muon, H 1": ("Muon + exchange", "Muon"),
    "SLAMB, as published": ("SLAMB, as published", "SLAMB"),
    "DiLoCo, H 30": ("DiLoCo, H 30", "DiLoCo"),
    "DeMo": ("DeMo", "rival"),
    "1-bit LAMB": ("1-bit LAMB", "rival"),
}
BUDGETS = "adamw, H 1", *(f"adamw, largest of {k}" for k in (7, 31, 127))
OUTER = tuple(f"adamw, outer, H {h}" for h in (10, 30, 100))
LOCAL = tuple(f"DiLoCo, H {h}" for h in (10, 30, 100))
SERIES = {  # of the losses by bytes: color, offset of the label, and methods
    "AdamW, dense": ("AdamW", (-8, 0), (DENSE,)),
    "LAMB, dense": ("LAMB", (-8, 0), ("LAMB",)),
    "AdamW + exchange": ("exchange", (8, 1), BUDGETS),
    "quantized\nouter step": ("outer", (-8, -2), OUTER),
    "SLAMB, as\npublished": ("SLAMB", (1, 20), ("SLAMB, as published",)),
    "SLAMB,\n8 bits": ("SLAMB", (-1, 20), ()),  # of benchmarks.few_bits
    "DiLoCo": ("DiLoCo", (8, 0), LOCAL),
    "DeMo": ("rival", (-8, 0), ("DeMo",)),
}
SHORTER = {"AdamW, dense": REFERENCES[1], "AdamW + exchange": "adamw, b1 0.8, H 1"}
GAPS = {  # of what scale.COMPARED compares: color, label, which point and offset
    "adamw, 1/19": ("exchange", "AdamW + exchange, 1/19", -1, (-1, -11)),
    "adamw, 1/45": ("exchange", "largest of 7, 1/45", -1, (8, 1)),
    "adamw, 1/180": ("outer", "quantized outer step,\n1/180", -1, (8, 0)),
    "muon, 1/18": ("Muon", "Muon + exchange, 1/18", 1, (8, -19)),
}
TASKS = {
    "byte_lm_apart": "each with files of its own",
    "prose": "bytes of prose, deep and narrow",
    "wide": "bytes, one wide layer",
    "gru": "bytes, recurrent network",
    "masked": "masked bytes, encoder",
    "digits": "digits, convolutions",
    "autoencoder": "digits, autoencoder",
}


class Row(NamedTuple):
    """A method in a setting: its loss above the dense optimizer's, in %."""

    name: str
    color: str
    above: float
    half_interval: float
    share: float  # of the bytes


def words(setting: Setting) -> str:
    """A setting, for those who do not know its name."""
    name = TASKS.get(setting.task, f"{parameters(setting.task):,} parameters")
    size = f"{setting.workers} workers x {setting.batch}, {setting.steps:,} steps"
    return f"{name}; {size}"


def point(cell: Cell, dense: Cell) -> Point:
    """The share of the bytes, and the loss."""
    return cell.bytes / dense.bytes, cell.loss, cell.half_interval


def dots(panel: Any, points: Sequence[Point], color: str, **how: Any) -> None:
    """Points with intervals, and a line through them."""
    x, y, half = zip(*points, strict=True)
    panel.errorbar(
        x, y, half, marker="o", color=color, capsize=2, elinewidth=1, **how
    )  # fmt: skip


def in_few_bits() -> list[Point]:
    """SLAMB in 8 bits, as far as it was run."""
    losses = few_bits.recorded("8 bits", Results(few_bits.RESULTS))
    params = jax.eval_shape(task(NOISY.task).init, jax.random.key(0))
    share = few_bits.exchange_of("8 bits").share(params)
    return [(share, fmean(losses), half_interval(losses))] if losses else []


def by_bytes(cells: Cells, path: Path) -> None:
    """The last loss of each method on NOISY, by the bytes that a worker sends."""
    found = {variant_of(x): point(cell, cells[DENSE]) for x, cell in cells.items()}
    with drawing(path, 5.6) as (figure, panel):
        for name, (kind, (across, up), methods) in SERIES.items():
            color = COLORS[kind]
            points = [found[x] for x in methods if x in found]
            if not (points := points if methods else in_few_bits()):
                continue
            dots(panel, points, color)
            label(panel, name, points[0], (across, up), color)
            if (short := found.get(SHORTER.get(name, ""))) is not None:
                dots(panel, [short], color, markerfacecolor="white")
                label(panel, "b1 0.8", short, (across, -1), color)
        panel.set(xscale="log", xlabel="bytes sent by a worker (1: float32 gradients)")
        panel.set_xticks([*TICKS], TICKS.values())
        panel.minorticks_off()
        panel.margins(0.08, 0.12)
        panel.set_ylabel(f"final loss, {task(NOISY.task).unit}")
        model = f"byte-level transformer of {parameters(NOISY.task):,} parameters,"
        size = f"{NOISY.workers} workers x {NOISY.batch} sequences, {NOISY.steps} steps"
        title(figure, "Final loss by bytes sent", model, size)


def rows(cells: Cells) -> tuple[str, list[Row]]:
    """The dense optimizer that others are beside, and they, the best first."""
    reference = next((x for x in REFERENCES if x in cells), None)
    if reference is None:
        return "", []
    dense, found = cells[reference], []
    for method, cell in cells.items():
        name = variant_of(method)
        if method == reference or name not in NAMES or cell.loss == math.inf:
            continue
        share, loss, half = point(cell, dense)
        above, half = (100 * x / dense.loss for x in (loss - dense.loss, half))
        found.append(Row(*NAMES[name], above, half, share))
    return reference, sorted(found, key=lambda row: row.above)


def limits(found: list[Row]) -> tuple[float, float]:
    """Room for all points, intervals that are not huge, and the column of shares."""
    ends = [(x.above, min(x.half_interval, WIDEST)) for x in found]
    low = min([-1.0, *(above - half for above, half in ends)])
    high = max([1.0, *(above + half for above, half in ends)])
    return low - 0.05 * (high - low), high + 0.25 * (high - low)


def by_setting(every: dict[Setting, Cells], path: Path) -> None:
    """By how much methods end above dense AdamW in each setting, a row for each."""
    tables = {setting: rows(cells) for setting, cells in every.items()}
    lines = sum(len(found) + 1.3 for _, found in tables.values())
    with drawing(path, 1.5 + 0.25 * lines) as (figure, panel):
        names: dict[float, str] = {}
        y = 0.0
        for setting, (reference, found) in tables.items():
            head = words(setting) + SHORT * reference.endswith(SHORT)
            panel.annotate(
                head, (0.01, y), xycoords=("figure fraction", "data"), va="center",
                annotation_clip=False, fontweight="bold", bbox=BACKED,
            ).set_in_layout(False)  # fmt: skip
            for row in found:
                y += 1
                names[y] = row.name
                panel.errorbar(
                    row.above, y, xerr=row.half_interval, fmt="o",
                    color=COLORS[row.color], capsize=2, elinewidth=1,
                )  # fmt: skip
                share = f"1/{1 / row.share:.0f}" if row.share < 0.99 else "1"
                panel.annotate(
                    share, (1, y), xycoords=("axes fraction", "data"), va="center",
                    ha="right", bbox=BACKED,
                )  # fmt: skip
            y += 1.3
        panel.axvline(0, color=INK, linewidth=1)
        panel.set_xlim(*limits([row for _, found in tables.values() for row in found]))
        panel.set_ylim(y - 0.6, -0.7)
        panel.set_yticks([*names], names.values())
        panel.grid(visible=False, axis="y")
        panel.set_xlabel("loss above dense AdamW's, %")
        first = "Loss above dense AdamW's (0), and the share of its bytes"
        title(figure, first, "means over seeds, with intervals of 95 %")


def by_size(results: Results, path: Path) -> None:
    """The gaps against the size, with intervals, and the lines."""
    every = {name: gaps(name, results) for name in COMPARED}
    sizes = sorted({gap.parameters for found in every.values() for gap in found})
    with drawing(path, 4.8) as (figure, panel):
        for i, (name, found) in enumerate(every.items()):
            if not found:
                continue
            kind, text, which, offset = GAPS[name]
            points = [  # beside each other
                (gap.parameters * 1.03**i, gap.above, 100 * gap.half_interval)
                for gap in found
            ]
            dots(panel, points, COLORS[kind], linestyle="")
            label(
                panel, text, points[min(which, len(points) - 1)], offset, COLORS[kind]
            )
            if fit := line(found):
                ends = found[0].parameters, found[-1].parameters
                at = [fit.at_million + fit.slope * math.log10(x / 1e6) for x in ends]
                shown = [100 * math.expm1(y) for y in at]
                panel.plot(ends, shown, color=COLORS[kind], linewidth=1)
        panel.axhline(0, color=INK, linewidth=1)
        panel.set(xscale="log", xlabel="parameters")
        panel.set_xticks(sizes, [f"{x / 1000:.0f} k" for x in sizes])
        panel.minorticks_off()
        panel.margins(0.17, 0.08)
        panel.set_ylabel("loss above the dense optimizer's, %")
        rest = "20 bytes of text a parameter, intervals of 95 %"
        title(figure, "The difference to dense training, by size", rest)
