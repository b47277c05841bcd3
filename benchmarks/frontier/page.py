"""The pictures and all tables of the results as one page of Markdown beside them."""

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.frontier import pictures, report
from benchmarks.frontier.claims import claims_table
from benchmarks.frontier.grid import GRIDS, NOISY, Setting
from benchmarks.frontier.methods import DENSE
from benchmarks.frontier.results import Results
from benchmarks.frontier.scale import length_table, scale_table

AGAINST_BYTES = "loss_against_bytes"
WIDTH = 200  # characters: no row of a table is broken


def write_page(settings: Iterable[Setting], results: Results, console: Console) -> Path:
    """Writes the page and its pictures, and the tables to the console."""
    path = results.path.with_suffix(".md")
    found = {x: report.cells(x, results) for x in settings}
    found = {setting: cells for setting, cells in found.items() if cells}
    with path.open("w") as file:
        page = Console(file=file, width=WIDTH)

        def line(text: str) -> None:
            page.print(text + "\n", markup=False, highlight=False, soft_wrap=True)

        def show(table: Table | None) -> None:
            if table is not None:
                console.print(table)
                line(markdown(table))

        line("# Loss against bytes")
        grid = next(name for name, of in GRIDS.items() if found.keys() <= set(of))
        option = "" if grid == "frontier" else f" --grid {grid}"
        line(f"Printed by `python -m benchmarks.frontier{option} --report`.")
        image = path.with_suffix(".png")
        pictures.by_setting(found, image)
        line(f"![Loss above dense AdamW's, by setting]({image.name})")
        if DENSE in found.get(NOISY, {}):
            pictures.by_bytes(found[NOISY], path.with_name(f"{AGAINST_BYTES}.png"))
            line(f"![Final loss by bytes sent]({AGAINST_BYTES}.png)")
        show(report.overview(found))
        if grid == "scale" and (gaps := scale_table(results)):
            show(gaps)
            show(length_table(results))
            pictures.by_size(results, path.with_name("gap_against_size.png"))
            line("![Loss above the dense optimizer's, by size](gap_against_size.png)")
        for setting, cells in found.items():
            line(f"## {setting}")
            show(report.setting_table(setting, cells))
            show(report.track_table(setting, cells))
            show(report.rivals_table(setting, cells))
            show(claims_table(setting, results))
    return path


def markdown(table: Table) -> str:
    title, caption = table.title, table.caption
    table.title = table.caption = None
    table.box = box.MARKDOWN
    page = Console(width=WIDTH)
    with page.capture() as text:
        page.print(table)
    below = f"\n\n{caption}." if caption else ""
    return f"{title}:\n\n{text.get().strip()}{below}"
