"""Cost against size: a step's time by parameters, its bytes by workers.

Run from the root of the repository: ``python -m benchmarks.scaling``. Time: update and
apply of SLAMB on square leaves of 1 M to 400 M parameters in all, medians. Bytes: what
each worker sends, read off the program compiled for 2 to 64 workers (CPU devices).
"""

import jax
import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console

import slamb_jax
from benchmarks.race import AXIS, race, seconds
from benchmarks.shapes import Shapes, abstract
from benchmarks.step import OPTIMIZERS, RATE
from examples.common.tables import table
from examples.common.traffic import traffic_of
from examples.hardware import hardware


def shapes_of(millions: int) -> Shapes:
    """So many leaves of a million elements (1024 x 1024), each with its bias."""
    shapes: Shapes = {}
    for i in range(millions):
        shapes |= {f"{i}/kernel": (1024, 1024), f"{i}/bias": (1024,)}
    return shapes


def main(
    millions: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 400),
    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64),
    rounds: int = 7,
    seed: int = 0,
) -> None:
    jax.config.update("jax_num_cpu_devices", max(workers))
    console, rows = Console(width=110), []
    for number in millions:
        ours = {"slamb": OPTIMIZERS["slamb"]}
        field = race(ours, shapes_of(number), rounds, seed)
        took, d = seconds(field["slamb"].times), number * (2**20 + 1024)
        row = {"parameters": f"{d:,}", "ms": f"{took * 1e3:.1f}"}
        rows.append(row | {"ns a parameter": f"{took / d * 1e9:.2f}"})
    caption = f"{hardware(jax.devices()[0])}; median of {rounds}"
    console.print(table("a step of SLAMB, one worker", rows, caption))

    rows, params, paper = [], abstract(shapes_of(2)), slamb_jax.Exchange.paper(AXIS)
    for n in workers:
        mesh = Mesh(np.array(jax.devices("cpu")[:n]), (AXIS,))
        sent = traffic_of(lambda x: slamb_jax.slamb(RATE, x), paper, params, mesh)
        row = {"workers": f"{n}", "a step": f"{sent.each:,.0f}"}
        row |= {"/ (n-1)/n": f"{sent.each * n / (n - 1):,.0f}"}
        rows.append(row | {"an average": f"{sent.average:,.0f}"})
    console.print(table("bytes each worker sends, 2.1 M parameters, k = 0.1", rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
