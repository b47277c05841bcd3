"""Trains the trials of a grid, and prints what came of them.

Run from the root of the repository: ``python -m benchmarks.train --grid NAME``. It does
the runs of the grid that are missing, one line of the results for each, and keeps a
checkpoint of a long run, so that it may be stopped and started again; then it prints
tables, and writes them to a page beside the results. What a grid compares, and why, is
said in its file in ``benchmarks/train/grids``.

``--out DIR`` makes runs that are recorded, those of ``--only``, anew in files of its
own, and prints their losses beside the recorded ones: with ``--seeds N`` N seeds at the
recorded rate, without it the whole search of rates.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import tyro
from rich.console import Console

from benchmarks.train.grids import GRIDS, METHODS
from benchmarks.train.page import write_page
from benchmarks.train.results import Results
from benchmarks.train.run import record, use_devices
from benchmarks.train.search import all_missing, best_rate, runs_at
from benchmarks.train.tables import beside_recorded, runs_of
from benchmarks.train.trials import Run, Trial
from examples.common.options import check_names
from examples.common.simulated import UnfinishedError

RECORDED = Path("benchmarks", "results")


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    grid: str = "frontier"
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """methods by name, or parts of "setting method", the name of a trial; repeat it"""
    seeds: int | None = None
    """this many seeds from 0 at the recorded rate, or at all that are given; None: the
    search, and its seeds"""
    out: Path = RECORDED
    """where GRID.jsonl is, or will be, and its page"""
    budget: float = float("inf")
    """seconds after which a run is stopped, to go on at the next call"""
    report: bool = False  # run nothing: tables and pictures only

    def is_meant(self, trial: Trial) -> bool:
        return not self.only or any(
            only in (trial.method, str(trial))
            if only.removeprefix(f"{trial.setting} ") in METHODS
            else only in str(trial)
            for only in self.only
        )


def trials(config: Config) -> list[Trial]:
    """The trials to run."""
    check_names("--grid", (config.grid,), GRIDS)
    found = [trial for trial in GRIDS[config.grid].trials if config.is_meant(trial)]
    if not found:
        raise SystemExit(f"--only: no trial has any of {', '.join(config.only)}")
    return found


def again(config: Config, recorded: Results) -> list[Run]:
    """Of each trial the first seeds at its given rates, or at the recorded one."""
    seeds, runs = range(config.seeds or 0), list[Run]()
    for trial in trials(config):
        for rate in trial.rates or [best_rate(trial, recorded)]:
            if rate is not None:
                runs += runs_at(trial, rate, seeds)
    return runs


def due(config: Config, results: Results, recorded: Results) -> Iterator[Run]:
    """The runs that are missing."""
    if config.seeds is None:
        yield from all_missing(trials(config), results)
        return
    runs = again(config, recorded)
    yield from (run for run in runs if results.get(run.key()) is None)


def minutes(config: Config, recorded: Results) -> float:
    """Of all runs on two cores, by the recorded ones."""
    total, anew = 0.0, again(config, recorded)
    for trial in trials(config):
        known = [run.get("run_seconds", 0.0) for run in runs_of(trial, recorded)]
        own = sum((x.setting, x.method) == (trial.setting, trial.method) for x in anew)
        count = len(known) if config.seeds is None else own
        total += count * statistics.median(known or [0.0]) / 60
    return total


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
    if not again(config, recorded):
        raise SystemExit(
            f"--seeds: {recorded.path} has no search of these runs; without --seeds "
            "one is made"
        )


def main(config: Config) -> None:
    chosen = trials(config)
    recorded = Results(RECORDED / f"{config.grid}.jsonl")
    check(config, recorded)
    console = Console()
    console.width = max(console.width, 150)  # the tables
    path = config.out / recorded.path.name
    results = Results(path, tuned=None if config.seeds is None else recorded)
    use_devices(max(trial.setting.workers for trial in chosen))
    if not config.report:
        run_all(config, results, recorded, console)
    grid, anew = GRIDS[config.grid], config.out != RECORDED
    if anew:  # the page of the recorded runs has all of them
        grid = dataclasses.replace(grid, trials=tuple(chosen))
    beside = beside_recorded(chosen, results, recorded) if anew else None
    shown = Console(quiet=config.seeds is not None and beside is not None)
    shown.width = console.width
    page = write_page(config.grid, grid, results, shown)
    if beside is not None:
        console.print(beside)
    console.print(f"Wrote {page}", highlight=False)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
