"""Measures how much of a step JointSpar-LARS saves, and what it costs in accuracy.

Run from the root of the repository: ``python -m benchmarks.jointspar``. It times steps
at several budgets, trains on digits and on bytes beside LARS, LAMB and SLAMB, prints
tables, and writes their figures to ``--out``. A training run whose result is there
already is not repeated, so that the benchmark may be stopped and started.
"""

import dataclasses
import json
from pathlib import Path
from typing import Literal

import jax
import tyro
from rich.console import Console

from benchmarks.jointspar.bandit import bandit_table
from benchmarks.jointspar.models import MODELS
from benchmarks.jointspar.step import measure, step_table
from benchmarks.jointspar.training import JOBS, train_all, training_table
from benchmarks.train.results import Results
from examples.common.processes import local_mesh
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


def main(config: Config) -> None:
    console = Console()
    console.width = max(console.width, 110)  # the tables
    config.out.mkdir(parents=True, exist_ok=True)
    mesh = local_mesh(config.workers)  # before anything starts the devices
    machine = hardware(mesh.devices.flat[0])
    chosen = [*MODELS, "bandit", *JOBS] if config.part == "all" else [config.part]
    for name in chosen:
        console.print(f"{name} begins; its table follows", highlight=False)
        if name in MODELS:
            model = MODELS[name](config.batch, config.seed)
            budgets = [share * model.layers for share in config.shares]
            rows = measure(model, budgets, config.rounds)
            title = f"{model.name}; means of {config.rounds} steps, seed {config.seed}"
            console.print(step_table(rows, title, hardware(jax.devices()[0])))
            figures = json.dumps([dataclasses.asdict(r) for r in rows], indent=1)
            (config.out / f"{name}.json").write_text(figures + "\n")
        elif name == "bandit":
            console.print(bandit_table(hardware(jax.devices()[0]), config.seed))
        else:
            results, steps = Results(config.out / "training.jsonl"), config.steps
            found = train_all(name, mesh, steps, config.seeds, results, console.print)
            size = f"{config.workers} workers x {JOBS[name].batch}, {steps} steps"
            title = f"{name}, {size}, {len(config.seeds)} seeds; loss in nats"
            console.print(training_table(found, title, machine))
    console.print(f"Wrote {config.out}", highlight=False)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
