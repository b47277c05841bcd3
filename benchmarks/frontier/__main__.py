"""Loss against bytes: the exchange of this library beside its rivals.

Run from the root of the repository: ``python -m benchmarks.frontier``. It does the runs
of the grid that are missing, one line of the results for each, and keeps a checkpoint
of a long run, so that it may be stopped and started again; then it prints tables, and
writes them, with a picture, to a page beside the results.
"""

import dataclasses
import time
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from benchmarks.frontier.grid import GRIDS, METHODS_OF, Setting
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.page import write_page
from benchmarks.frontier.results import Results
from benchmarks.frontier.run import record
from benchmarks.frontier.sweep import missing

Grid = Literal["frontier", "unseen", "big", "scale", "huge", "track", "smoke"]


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    grid: Grid = "frontier"
    only: tuple[str, ...] = ()
    """methods by name, or parts of "setting method", the name of a pair"""
    budget: float = float("inf")  # seconds after which no run is started
    results: Path | None = None  # benchmarks/results/GRID.jsonl
    report: bool = False  # run nothing: tables and pictures only


def pairs(config: Config) -> list[tuple[Setting, str]]:
    """The settings and methods to run."""
    chosen = [
        (setting, method)
        for setting in GRIDS[config.grid]
        for method in METHODS_OF.get(setting, METHODS)
        if not config.only or any(is_meant(o, setting, method) for o in config.only)
    ]
    if not chosen:
        raise SystemExit(f"--only: no run has any of {', '.join(config.only)}")
    return chosen


def is_meant(only: str, setting: Setting, method: str) -> bool:
    pair = f"{setting} {method}"
    if only.removeprefix(f"{setting} ") in METHODS:
        return only in (method, pair)
    return only in pair


def run_all(config: Config, results: Results, console: Console) -> None:
    stop = time.monotonic() + config.budget
    for setting, method in pairs(config):
        for run in missing(setting, method, results):
            if time.monotonic() > stop:
                console.print(f"The budget of {config.budget:g} s is spent.")
                return
            record(run, results, console)


def main(config: Config) -> None:
    console = Console()
    console.width = max(console.width, 150)  # the tables
    here = Path("benchmarks", "results", f"{config.grid}.jsonl")
    results = Results(config.results or here)
    if not config.report:
        run_all(config, results, console)
    settings = dict.fromkeys(setting for setting, _ in pairs(config))
    console.print(f"Wrote {write_page(settings, results, console)}", highlight=False)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
