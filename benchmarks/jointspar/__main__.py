"""What JointSpar-LARS saves of a step, and what it costs in accuracy.

Run from the root of the repository: ``python -m benchmarks.jointspar``. It times steps
over the budget, trains on digits and on bytes beside LARS, LAMB and SLAMB, prints
tables, and writes pictures and the figures behind them to ``--out``. Training runs that
are there already are not done again, so that it may be stopped and started.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console

from benchmarks.frontier.results import Results
from benchmarks.jointspar import report
from benchmarks.jointspar.bandit import bandit_table
from benchmarks.jointspar.models import MODELS
from benchmarks.jointspar.step import measure
from benchmarks.jointspar.training import TASKS, train_all
from examples.byte_lm.main import worker_mesh
from examples.hardware import hardware


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    part: Literal["all", "resnet", "transformer", "bandit", "digits", "byte_lm"] = "all"
    rounds: int = 20  # of timed steps
    batch: int = 32  # images, sequences of a timed step
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)  # budgets, of D
    seed: int = 0
    workers: int = 4  # that train
    steps: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = Path("runs/jointspar")


def steps(config: Config, console: Console, name: str) -> None:
    model = MODELS[name](config.batch, config.seed)
    budgets = [share * model.layers for share in config.shares]
    rows = measure(model, budgets, config.rounds)
    title = f"{model.name}; means of {config.rounds} steps, seed {config.seed}"
    console.print(report.step_table(rows, title, hardware(jax.devices()[0])))
    report.step_picture(rows, config.out / f"{name}.png")
    figures = [dataclasses.asdict(r) for r in rows]
    (config.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


def training(config: Config, console: Console, name: str, mesh: Mesh) -> None:
    results = Results(config.out / "training.jsonl")
    found = train_all(name, mesh, config.steps, config.seeds, results, console.print)
    make, batch = TASKS[name]
    unit = make().unit
    size = f"{config.workers} workers x {batch}, {config.steps} steps"
    title = f"{name}, {size}, {len(config.seeds)} seeds; loss in {unit}"
    machine = hardware(mesh.devices.flat[0])
    console.print(report.training_table(found, title, machine))
    report.training_picture(found, unit, config.out / f"{name}.png")


def main(config: Config) -> None:
    console = Console()
    console.width = max(console.width, 110)  # the tables
    config.out.mkdir(parents=True, exist_ok=True)
    mesh = worker_mesh(config.workers)  # before anything starts the devices
    for name in MODELS:
        if config.part in ("all", name):
            steps(config, console, name)
    if config.part in ("all", "bandit"):
        console.print(bandit_table(hardware(jax.devices()[0]), config.seed))
    for name in TASKS:
        if config.part in ("all", name):
            training(config, console, name, mesh)
    console.print(f"Wrote {config.out}", highlight=False)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
