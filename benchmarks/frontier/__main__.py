"""Loss against bytes: the exchange of this library beside its rivals.

Run from the root of the repository: ``python -m benchmarks.frontier``. It does the runs
of the grid that are missing, one line of the results for each, and keeps a checkpoint
of a long run, so that it may be stopped and started again; then it prints tables, and
writes them, with pictures, to a page beside the results.

``--out DIR`` makes runs that are recorded, those of ``--only``, anew in files of its
own, and prints their losses beside the recorded ones: with ``--seeds N`` N seeds at the
recorded rate, without it the whole sweep of rates.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from benchmarks.frontier import anew
from benchmarks.frontier.grid import GRIDS, METHODS_OF, Setting
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.page import write_page
from benchmarks.frontier.results import Results
from benchmarks.frontier.run import Run, record
from benchmarks.frontier.sweep import all_missing
from benchmarks.frontier.wire import use_devices
from examples.common.simulated import UnfinishedError

RECORDED = Path("benchmarks", "results")
Grid = Literal["frontier", "unseen", "big", "scale", "huge", "track", "smoke", "tiny"]


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    grid: Grid = "frontier"
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """methods by name, or parts of "setting method", the name of a pair; repeat it"""
    seeds: int | None = None
    """this many seeds from 0 at the recorded rate; None: the sweep, and its seeds"""
    out: Path = RECORDED
    """where GRID.jsonl is, or will be, and its page"""
    budget: float = float("inf")
    """seconds after which a run is stopped, to go on at the next call"""
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


def due(config: Config, results: Results, recorded: Results) -> Iterator[Run]:
    """The runs that are missing."""
    chosen = pairs(config)
    if config.seeds is None:
        yield from all_missing(chosen, results)
        return
    again = anew.runs_again(chosen, config.seeds, recorded)
    yield from (run for run in again if results.get(run.key()) is None)


def minutes(config: Config, recorded: Results) -> float:
    """Of all runs on two cores, by the recorded ones."""
    if config.seeds is None:
        return anew.minutes_of_sweeps(pairs(config), recorded)
    return anew.minutes(
        anew.runs_again(pairs(config), config.seeds, recorded), recorded
    )


def run_all(
    config: Config, results: Results, recorded: Results, console: Console
) -> None:
    stop, done = time.monotonic() + config.budget, 0
    if config.out != RECORDED and (about := minutes(config, recorded)):
        at = f"All runs anew into {results.path}: "
        at += f"about {max(1, about):.0f} min on two cores."
        console.print(at, highlight=False)
    for run in due(config, results, recorded):
        try:
            if time.monotonic() > stop:
                raise UnfinishedError("not started")
            record(run, results, console, stop)
        except UnfinishedError as how:
            at = f"The budget of {config.budget:g} s is spent: {how}."
            console.print(at, highlight=False)
            return
        done += 1
    if not done:
        at = f"Nothing to run: all is in {results.path}."
        console.print(f"{at} --out DIR makes it anew.", highlight=False)


def check(config: Config, recorded: Results) -> None:
    """Ends the program where ``seeds`` means no run."""
    if config.seeds is None:
        return
    if config.seeds < 1:
        raise SystemExit(f"--seeds must be >= 1: {config.seeds}")
    if config.out == RECORDED:
        raise SystemExit(f"--seeds: {RECORDED} has them; --out DIR makes them anew")
    if not anew.runs_again(pairs(config), config.seeds, recorded):
        raise SystemExit(
            f"--seeds: {recorded.path} has no sweep of these runs; without --seeds one "
            "is made"
        )


def main(config: Config) -> None:
    recorded = Results(RECORDED / f"{config.grid}.jsonl")
    check(config, recorded)
    console = Console()
    console.width = max(console.width, 150)  # the tables
    path = config.out / recorded.path.name
    results = Results(path, tuned=None if config.seeds is None else recorded)
    chosen = pairs(config)
    if not config.report:
        use_devices(max(setting.workers for setting, _ in chosen))
        run_all(config, results, recorded, console)
    settings: Iterable[Setting] = dict.fromkeys(setting for setting, _ in chosen)
    if config.out == RECORDED:  # whose page has all that is recorded
        settings = GRIDS[config.grid]
    shown = Console(quiet=config.seeds is not None)
    shown.width = console.width
    page = write_page(settings, results, shown)
    if results.path != recorded.path and (
        beside := anew.compared(chosen, results, recorded)
    ):
        console.print(beside)
    console.print(f"Wrote {page}", highlight=False)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
