"""The picture and all tables of the results as one page of Markdown beside them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.frontier import report
from benchmarks.frontier.claims import claims_table
from benchmarks.frontier.grid import GRIDS, NOISY, Setting
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.results import Results
from benchmarks.frontier.scale import length_table, scale_picture, scale_table

WIDTH = 200  # characters: no row of a table is broken


def write_page(settings: Iterable[Setting], results: Results, console: Console) -> Path:
    """Writes the page and its picture, and the tables to the console."""
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
        picture(found, image)
        if NOISY in found:
            picture({NOISY: found[NOISY]}, path.with_name("loss_against_bytes.png"))
        line(f"![Loss above the best dense run, against bytes]({image.name})")
        show(report.overview(found))
        if grid == "scale" and (gaps := scale_table(results)):
            show(gaps)
            show(length_table(results))
            scale_picture(results, path.with_name("gap_against_size.png"))
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


def picture(found: dict[Setting, report.Cells], path: Path) -> None:
    """By how much each method ends above the best dense run, against its bytes.

    With intervals of 95 % over seeds.
    """
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(
        1, len(found), figsize=(max(7.0, 4.2 * len(found)), 4.6), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    colors = [plt.get_cmap("tab20")(i) for i in range(20)]
    groups = list(dict.fromkeys(map(report.group, METHODS)))
    color = {name: colors[(2 * i + i // 10) % 20] for i, name in enumerate(groups)}
    lowest = 0.0
    for panel, (setting, cells) in zip(panels[0], found.items(), strict=True):
        for name, points in report.above_dense(cells).items():
            ours = name in report.OUR_GROUPS
            shares, losses, intervals = zip(*points, strict=True)
            lowest = min(lowest, *losses)
            panel.errorbar(
                shares, losses, intervals, fmt="o-" if ours else "s--",
                color=color[name], label=name, linewidth=2.2 if ours else 1,
                markersize=5 if ours else 4, capsize=2, elinewidth=1,
            )  # fmt: skip
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(xscale="log", title=str(setting), xlabel="share of dense float32")
        twice = (lambda x: 2 * x), (lambda x: x / 2)
        top = panel.secondary_xaxis("top", functions=twice)
        top.set_xlabel("of dense bfloat16")
        top.xaxis.set_minor_formatter("")  # labels would overlap
        panel.grid(alpha=0.3)
    panels[0][0].set_ylim(lowest - 2, 45)  # above it a method is off the picture
    panels[0][0].set_ylabel("loss above the best dense run, %")
    lines: dict[str, Any] = {}
    for panel in panels[0]:
        handles, labels = panel.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    names = [name for name in groups if name in lines]
    figure.legend(
        handles=[lines[x] for x in names], loc="outside lower center",
        ncol=7 if len(found) > 1 else 5,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    plt.close(figure)
