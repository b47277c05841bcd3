"""Measures how much of a step JointSpar-LARS saves, and what it costs in accuracy.

Run from the root of the repository: ``python -m benchmarks.jointspar``. It times steps
at several budgets, trains on digits and on bytes beside LARS, LAMB and SLAMB, and
prints tables. A training run whose result is in ``--out`` is not repeated, so that the
benchmark may be stopped and started.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from benchmarks.jointspar.step import measure, step_table, transformer
from benchmarks.jointspar.training import JOBS, Results, cells, train_all
from examples.common.processes import local_mesh
from examples.common.tables import table
from examples.hardware import hardware


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    part: Literal["all", "transformer", "digits", "byte_lm"] = "all"
    rounds: int = 20  # of timed steps
    batch: int = 32  # sequences of a timed step
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)  # budgets, of D
    seed: int = 0
    workers: int = 4  # that train
    steps: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = Path("runs/jointspar")


def main(config: Config) -> None:
    console, mesh = Console(width=110), local_mesh(config.workers)
    machine, steps = hardware(mesh.devices.flat[0]), config.steps
    chosen = [config.part]
    for name in ["transformer", *JOBS] if config.part == "all" else chosen:
        console.print(f"{name} begins; its table follows", highlight=False)
        if name == "transformer":
            model = transformer(config.batch, config.seed)
            budgets = [share * model.layers for share in config.shares]
            timed = measure(model, budgets, config.rounds)
            size = f"{name}, {config.batch} sequences of 64; means of {config.rounds}"
            title = f"{size} steps, seed {config.seed}"
            console.print(step_table(timed, title, machine))
        else:
            results = Results(config.out / "training.jsonl")
            found = train_all(name, mesh, steps, config.seeds, results, console.print)
            size = f"{config.workers} workers x {JOBS[name].batch}, {steps} steps"
            title = f"{name}, {size}, {len(config.seeds)} seeds; loss in nats"
            rows = [cells(runs, found[0]) for runs in found]
            console.print(table(title, rows, machine))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
