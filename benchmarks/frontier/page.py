"""All tables and pictures of the results as one page of Markdown beside them."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.frontier import report
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.results import Results
from benchmarks.frontier.tasks import task

WIDTH = 200  # characters: no row of a table is broken


def write_page(settings: Iterable[Setting], results: Results, console: Console) -> Path:
    """Writes the page, a picture for each setting, and the tables to the console."""
    path, settings = results.path.with_suffix(".md"), list(settings)
    with path.open("w") as file:
        page = Console(file=file, width=WIDTH)

        def line(text: str) -> None:
            page.print(text + "\n", markup=False, highlight=False, soft_wrap=True)

        def show(table: Table | None) -> None:
            if table is not None:
                console.print(table)
                line(_markdown(table))

        line("# Loss against bytes and time")
        line("What `python -m benchmarks.frontier --report` printed.")
        show(report.overview(settings, results))
        for setting in settings:
            found = report.cells(setting, results)
            if not found:
                continue
            image = path.with_name(f"{path.stem}-{setting}.png")
            picture(setting, found, image)
            line(f"## {setting}")
            show(report.setting_table(setting, found))
            show(report.rivals_table(setting, found))
            line(f"![Loss against bytes and seconds]({image.name})")
    return path


def _markdown(table: Table) -> str:
    title, caption = table.title, table.caption
    table.title = table.caption = None
    table.box = box.MARKDOWN
    page = Console(width=WIDTH)
    with page.capture() as text:
        page.print(table)
    below = f"\n\n{caption}." if caption else ""
    return f"{title}:\n\n{text.get().strip()}{below}"


def picture(setting: Setting, found: report.Cells, path: Path) -> None:
    """Loss against bytes, and against seconds on each link."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, 1 + len(report.LINKS), figsize=(18, 4.5), sharey=True, layout="constrained"
    )
    colors = plt.get_cmap("tab20")
    for name, cell in found.items():
        style: dict[str, Any] = {"label": name, "marker": "o", "markersize": 3}
        style |= {"color": colors(list(METHODS).index(name))}
        style |= {"linewidth": 2.5 if "SLAMB" in name else 1}
        # To the end of the shortest: a run that diverged has fewer.
        points = list(zip(*(run["points"] for run in cell.runs), strict=False))
        means = [_mean(same) for same in points]
        sent = [cell.bytes_by(same[0]) / 2**20 for same in points]
        panels[0].plot(sent, means, **style)
        for panel, (link, rate) in zip(panels[1:], report.LINKS.items(), strict=True):
            seconds = [cell.seconds_by(same[0], rate) for same in points]
            panel.plot(seconds, means, **style)
            panel.set(xlabel=f"seconds at {link}")
    panels[0].set(xlabel="MiB sent by each worker", ylabel=task(setting.task).unit)
    low, high = panels[0].dataLim.intervaly
    if low < high / 10:  # a loss that goes to 0
        panels[0].set_yscale("log")  # the others share it
    for panel in panels:
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter("")
        panel.grid(alpha=0.3, which="both")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside right center", fontsize=8)
    figure.suptitle(str(setting))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _mean(points: tuple[report.Point, ...]) -> float:
    losses = [point["loss"] for point in points]
    return float("nan") if None in losses else statistics.fmean(losses)
