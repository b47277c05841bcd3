"""Runs a program over a grid of options and tabulates the results.

Run from the root of the repository, for instance ``python -m examples.sweep cifar10
--grid dense=false,true seed=0,1,2,3,4``: one run for each combination, a row for each
but for the seeds, which are averaged. The words after ``--options`` go to each run.
A run that is finished in ``--out`` is not made again.
"""

import argparse
import dataclasses
import hashlib
import importlib
import itertools
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from examples.common import loop, options, processes, tables
from examples.hardware import hardware

PROGRAMS = ("cifar10", "bert", "swin")
FLAGS = {"true": True, "false": False}
Setting = tuple[tuple[str, str], ...]


def settings(grid: Sequence[str]) -> list[Setting]:
    """All combinations of ``name=value,value``."""
    axes = []
    for text in grid:
        name, _, values = text.partition("=")
        if not values:
            raise SystemExit(f"--grid: name=value,value,... wanted, got {text!r}")
        axes.append([(name, value) for value in values.split(",")])
    return list(itertools.product(*axes))


def arguments(setting: Setting) -> list[str]:
    """Words of a command line; a value a/b of --grid becomes two words."""
    words: list[str] = []
    for name, value in setting:
        flag = None if name.replace("-", "_") in options.SETTINGS else FLAGS.get(value)
        words += options.words(name, value.split("/") if flag is None else flag)
    return words


def run_all(
    program: str, chosen: list[Setting], rest: list[str], out: Path, console: Console
) -> dict[Setting, loop.Result]:
    """One result for each setting, in one process."""
    train = importlib.import_module(f"examples.{program}.train")
    results, mesh = {}, None
    for setting in chosen:
        config = options.parse(train.Config, "", [*rest, *arguments(setting)])
        named = options.as_text(dataclasses.replace(config, out=Path()))
        folder = out / hashlib.sha256(named.encode()).hexdigest()[:12]
        config = dataclasses.replace(config, out=folder)
        mesh = mesh or processes.start(config)
        results[setting] = loop.run(
            train.task(config, train.sources(config)), config, mesh
        )
        told = " ".join(f"{n}={v}" for n, v in setting)
        console.print(f"{told}: {results[setting].metrics}")
    return results


def table(results: dict[Setting, loop.Result], title: str, caption: str) -> Table:
    """A row for each setting but the seed: mean and deviation over the seeds."""
    groups: dict[Setting, list[loop.Result]] = {}
    for setting, result in results.items():
        key = tuple(pair for pair in setting if pair[0] != "seed")
        groups.setdefault(key, []).append(result)
    rows = []
    for key, group in groups.items():
        sent = statistics.fmean(r.bytes_sent / r.step for r in group)
        dense = statistics.fmean(r.dense_bytes / r.step for r in group)
        seconds = statistics.median(r.step_seconds for r in group)
        scores = {
            m: tables.spread([r.metrics[m] for r in group]) for m in group[0].metrics
        }
        rows.append(
            {
                **dict(key),
                "runs": str(len(group)),
                **scores,
                "KiB sent per step": f"{sent / 1024:.1f}",
                "share of dense": f"{sent / dense:.3f}" if dense else "",
                "ms per step": f"{seconds * 1000:.0f}",
            }
        )
    return tables.table(title, rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--grid", nargs="+", required=True, metavar="NAME=VALUES")
    parser.add_argument("--out", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[])
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    chosen = settings(given.grid)
    results = run_all(given.program, chosen, given.options, given.out, console)
    title = shlex.join(["examples.sweep", given.program, "--grid", *given.grid])
    if given.options:
        title += " --options " + shlex.join(given.options)
    last = next(iter(results.values())).step
    caption = f"{last} steps; {hardware(jax.devices()[0])}"
    console.print(table(results, title, caption))


if __name__ == "__main__":
    main()
