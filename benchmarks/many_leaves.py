"""How long a step of many small leaves takes to compile, and to run.

Run from the root of the repository: ``python -m benchmarks.many_leaves``. A model whose
layers are not scanned has hundreds of leaves. Every optimizer steps on devices of the
CPU, each a worker with gradients of its own; optax's optimizers average them first.
"""

import dataclasses

import jax
import tyro
from rich.console import Console

from benchmarks.race import Workers, race, seconds
from benchmarks.rivals import elements
from benchmarks.shapes import Shapes, abstract
from benchmarks.step import DENSE, averaged, exchanging
from examples.common.options import check_names
from examples.common.processes import local_mesh
from examples.common.tables import table
from examples.hardware import hardware

WIDTH = 64
LAYER = [  # of a Transformer: norms, attention and two dense layers
    (WIDTH,), (WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH,),
    (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH),
]  # fmt: skip
OURS = ("adamw", "adamw, in float32", "lamb", "slamb, as published")


def shapes_of(leaves: int) -> Shapes:
    return {f"{i:04}": LAYER[i % len(LAYER)] for i in range(leaves)}


@dataclasses.dataclass(frozen=True)
class Config:
    """The steps to compile."""

    leaves: tuple[int, ...] = (20, 200, 400)
    workers: int = 4
    only: tuple[str, ...] = ()
    """names of optimizers; none: all"""
    rounds: int = 10
    seed: int = 0


def main(config: Config) -> None:
    makes = {name: averaged(make) for name, make in DENSE.items()} | exchanging()
    check_names("--only", config.only, makes)
    makes = {name: makes[name] for name in config.only or (*DENSE, *OURS)}
    workers = Workers(config.workers, local_mesh(config.workers))
    rows = []
    for leaves in config.leaves:
        shapes = shapes_of(leaves)
        field = race(makes, shapes, config.rounds, config.seed, workers)
        for name, c in field.items():
            rows.append(
                {
                    "leaves": f"{leaves}",
                    "parameters": f"{elements(abstract(shapes)):,}",
                    "optimizer": name,
                    "trace s": f"{c.trace_seconds:.1f}",
                    "compile s": f"{c.compile_seconds:.1f}",
                    "ms": f"{seconds(c.times) * 1000:.1f}",
                }
            )
    caption = (
        f"{hardware(jax.devices()[0])}; {config.workers} workers; median of "
        f"{config.rounds}, seed {config.seed}"
    )
    Console(width=100).print(table("One step of many small leaves", rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
