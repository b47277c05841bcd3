"""All tables and pictures of the results as one page of Markdown beside them."""

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.frontier.grid import Setting
from benchmarks.frontier.overview import overview
from benchmarks.frontier.report import picture, table
from benchmarks.frontier.results import Results
from benchmarks.frontier.versus import versus

WIDTH = 200  # characters: no row of a table is broken


def write_page(settings: Iterable[Setting], results: Results, console: Console) -> Path:
    """Writes the page, a picture for each setting, and the tables to the console."""
    path = results.path.with_suffix(".md")
    with path.open("w") as file:
        page = Console(file=file, width=WIDTH)
        _line(page, "# Loss against bytes and time")
        _line(page, "What `python -m benchmarks.frontier --report` printed.")
        settings = list(settings)
        _show(overview(settings, results), page, console)
        for setting in settings:
            image = path.with_name(f"{path.stem}-{setting}.png")
            if not picture(setting, results, image):
                continue
            _line(page, f"## {setting}")
            _show(table(setting, results), page, console)
            _show(versus(setting, results), page, console)
            _line(page, f"![Loss against bytes and seconds]({image.name})")
    return path


def _show(shown: Table | None, page: Console, console: Console) -> None:
    if shown is not None:
        console.print(shown)
        _markdown(page, shown)


def _line(page: Console, text: str) -> None:
    page.print(text + "\n", markup=False, highlight=False, soft_wrap=True)


def _markdown(page: Console, shown: Table) -> None:
    title, caption = shown.title, shown.caption
    shown.title = shown.caption = None
    shown.box = box.MARKDOWN
    _line(page, f"{title}:")
    with page.capture() as text:
        page.print(shown)
    _line(page, text.get().strip())
    if caption:
        _line(page, f"{caption}.")
