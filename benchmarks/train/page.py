"""All tables of a grid's results, and its picture, as one page beside them."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.pictures import COLORS, drawing, label, title
from benchmarks.train import tables
from benchmarks.train.grids.frontier import NOISY
from benchmarks.train.results import Results
from benchmarks.train.tables import Cell, of_method, variant_of
from benchmarks.train.tasks import parameters, task
from benchmarks.train.trials import Grid

WIDTH = 300  # characters: no row of a table is broken
TICKS = {10.0**-i: f"1/{10**i}" for i in (3, 2, 1)} | {1 / 2: "1/2", 1.0: "1"}
BUDGETS = "adamw, H 1", *(f"adamw, largest of {k}" for k in (7, 31, 127))
SERIES = {  # of the losses by bytes: color, offset of the label, and methods
    "AdamW, dense": ("AdamW", (-8, 0), ("AdamW",)),
    "LAMB, dense": ("LAMB", (-8, 0), ("LAMB",)),
    "AdamW + exchange": ("exchange", (8, 1), BUDGETS),
    "quantized\nouter step": (
        "outer", (-8, -2), tuple(f"adamw, outer, H {h}" for h in (10, 30, 100)),
    ),
    "SLAMB, as\npublished": ("SLAMB", (1, 20), ("SLAMB, as published",)),
    "SLAMB,\n8 bits": ("SLAMB", (-1, 20), ("SLAMB, H 100, 8 bits",)),
    "DiLoCo": ("DiLoCo", (8, 0), tuple(f"DiLoCo, H {h}" for h in (10, 30, 100))),
    "DeMo": ("rival", (-8, 0), ("DeMo",)),
}  # fmt: skip
SHORTER = {"AdamW, dense": "AdamW, b1 0.8", "AdamW + exchange": "adamw, b1 0.8, H 1"}


def write_page(name: str, grid: Grid, results: Results, console: Console) -> Path:
    """Writes the page and its picture, and the tables to the console."""
    path, found = results.path.with_suffix(".md"), tables.by_setting(grid, results)
    lines = [
        f"# {grid.title}",
        f"Printed by `python -m benchmarks.train --grid {name} --report`.",
    ]

    def show(table: Table | None) -> None:
        if table is not None:
            console.print(table)
            lines.append(markdown(table))

    if name == "frontier" and of_method(found.get(NOISY, []), grid.dense):
        image = path.with_name("loss_against_bytes.png")
        by_bytes([*found[NOISY], *in_few_bits()], image)
        lines.append(f"![The loss in the end, by the bytes sent]({image.name})")
    show(tables.comparisons_table(grid, results))
    for setting, here in found.items():
        lines.append(f"## {setting}")
        show(tables.setting_table(setting, grid, here))
    path.write_text("\n\n".join(lines) + "\n")
    return path


def markdown(table: Table) -> str:
    heading, caption = table.title, table.caption
    table.title = table.caption = None
    table.box = box.MARKDOWN
    page = Console(width=WIDTH, file=io.StringIO())
    with page.capture() as text:
        page.print(table)
    below = f"\n\n{caption}." if caption else ""
    return f"{heading}:\n\n{text.get().strip()}{below}"


def dots(panel: Any, points: Sequence[Any], color: str, **how: Any) -> None:
    """Points with intervals, and a line through them."""
    x, y, half = zip(*points, strict=True)
    panel.errorbar(
        x, y, half, marker="o", color=color, capsize=2, elinewidth=1, **how
    )  # fmt: skip


def in_few_bits() -> list[Cell]:
    """SLAMB in codes, as far as it was run."""
    from benchmarks.train.grids import GRIDS

    recorded = Results(Path("benchmarks", "results", "few_bits.jsonl"))
    return tables.cells(GRIDS["few_bits"].trials, recorded)


def by_bytes(found: Sequence[Cell], path: Path) -> None:
    """The last loss of each method on NOISY, by the bytes that a worker sends."""
    whole = of_method(found, "AdamW")
    assert whole is not None
    points = {
        variant_of(x.trial.method): (x.bytes / whole.bytes, x.loss, x.half_interval)
        for x in found
    }
    with drawing(path, 5.6) as (figure, panel):
        for name, (kind, (across, up), methods) in SERIES.items():
            color, own = COLORS[kind], [points[x] for x in methods if x in points]
            if not own:
                continue
            dots(panel, own, color)
            label(panel, name, own[0], (across, up), color)
            if (short := points.get(SHORTER.get(name, ""))) is not None:
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
