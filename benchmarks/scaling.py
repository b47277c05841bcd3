"""Cost against size: a step's time by parameters, its bytes by workers.

Run from the root of the repository: ``python -m benchmarks.scaling``. Time: update and
apply of SLAMB on square leaves of 1 M to 400 M parameters in all, medians. Bytes: what
each worker sends, read off the program compiled for 2 to 64 workers (CPU devices).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import slamb_jax
from benchmarks.shapes import Shapes
from benchmarks.step import OPTIMIZERS, RATE, race, seconds
from examples.common.simulated import DEFAULT
from examples.common.traffic import slamb_traffic
from examples.hardware import hardware


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    millions: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 400)
    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    rounds: int = 7
    seed: int = 0


def shapes_of(millions: int) -> Shapes:
    """So many leaves of a million elements (1024 x 1024), each with its bias."""
    shapes: Shapes = {}
    for i in range(millions):
        shapes |= {f"{i}/kernel": (1024, 1024), f"{i}/bias": (1024,)}
    return shapes


def main(config: Config) -> None:
    jax.config.update("jax_num_cpu_devices", max(config.workers))
    console = Console(width=110)
    table = Table(
        title="a step of SLAMB, one worker",
        caption=f"{hardware(jax.devices()[0])}; median of {config.rounds}",
    )
    for head in ("parameters", "ms", "ns a parameter"):
        table.add_column(head, justify="right")
    for millions in config.millions:
        ours = {"slamb": OPTIMIZERS["slamb"]}
        field = race(ours, shapes_of(millions), config.rounds, config.seed)
        took, d = seconds(field["slamb"].times), millions * (2**20 + 1024)
        table.add_row(f"{d:,}", f"{took * 1e3:.1f}", f"{took / d * 1e9:.2f}")
    console.print(table)

    table = Table(title="bytes each worker sends, 2.1 M parameters, k = 0.1")
    for head in ("workers", "a step", "/ (n-1)/n", "an average"):
        table.add_column(head, justify="right")
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes_of(2).items()}
    for n in config.workers:
        mesh = Mesh(np.array(jax.devices("cpu")[:n]), (DEFAULT.axis_name,))
        sent = slamb_traffic(lambda x: slamb_jax.slamb(RATE, x), DEFAULT, params, mesh)
        (step,) = sent.exchange.values()
        ring = step * n / (n - 1)
        table.add_row(f"{n}", f"{step:,.0f}", f"{ring:,.0f}", f"{sent.average:,.0f}")
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
