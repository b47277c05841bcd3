"""Cost against size: a step's time by parameters, bytes and compilation by workers.

Run from the root of the repository: ``python -m benchmarks.scaling``. Time: update and
apply on square leaves of 1 M to 300 M parameters in all, dense AdamW and the default
exchange in turns between two workers on two CPU devices; medians. The largest needs
20 GB. Bytes: what each worker sends, read off the programs of 2 to 64 CPU devices.
"""

import math
import time

import jax
import numpy as np
import tyro
from jax.sharding import Mesh
from rich.console import Console

import slamb_jax
from benchmarks.race import AXIS, Workers, race, seconds
from benchmarks.shapes import Shapes, abstract
from benchmarks.step import DENSE, RATE, averaged, exchanging
from examples.common.processes import local_mesh
from examples.common.tables import table
from examples.common.traffic import traffic_of
from examples.hardware import hardware

LARGE = 128  # millions of parameters; else there are hundreds of leaves to compile
TIMED = {"dense": averaged(DENSE["optax.adamw"]), "adamw": exchanging()["adamw"]}
SENT = {
    "adamw": (slamb_jax.Exchange(AXIS), lambda x: slamb_jax.adamw(RATE, x)),
    "SLAMB": (slamb_jax.Exchange.paper(AXIS), lambda x: slamb_jax.slamb(RATE, x)),
}


def shapes_of(millions: int) -> Shapes:
    """Square leaves, each with its bias: of 1 M elements, in large models of 4 M."""
    side = 2048 if millions >= LARGE else 1024
    shapes: Shapes = {}
    for i in range(millions * 1024**2 // side**2):
        shapes |= {f"{i}/kernel": (side, side), f"{i}/bias": (side,)}
    return shapes


def row_of_size(millions: int, rounds: int, seed: int) -> dict[str, str]:
    """The times of a step with so many parameters."""
    shapes = shapes_of(millions)
    field = race(TIMED, shapes, rounds, seed, Workers(2, local_mesh(2)))
    d = sum(map(math.prod, shapes.values()))
    dense, ours = (seconds(field[name].times) for name in TIMED)
    return {
        "parameters": f"{d:,}",
        "matrices": f"{len(shapes) // 2}",
        "dense, ms": f"{dense * 1e3:.1f}",
        "ns each": f"{dense / d * 1e9:.2f}",
        "adamw, ms": f"{ours * 1e3:.1f}",
        "ns each ": f"{ours / d * 1e9:.2f}",
        "/ dense": f"{ours / dense:.2f}",
        "compile s": f"{field['adamw'].compile_seconds:.1f}",
    }


def row_of_workers(n: int) -> dict[str, str]:
    """What each of n workers sends, and the seconds to compile it."""
    row, params = {"workers": f"{n}"}, abstract(shapes_of(2))
    mesh = Mesh(np.array(jax.devices("cpu")[:n]), (AXIS,))
    for name, (exchange, make) in SENT.items():
        began = time.perf_counter()
        sent = traffic_of(make, exchange, params, mesh)
        row |= {
            f"{name}, bytes": f"{sent.each:,.0f}",
            f"{name}, / ((n-1)/n)": f"{sent.each * n / (n - 1):,.0f}",
            f"{name}, s": f"{time.perf_counter() - began:.1f}",
        }
    return row


def main(
    millions: tuple[int, ...] = (1, 4, 16, 64, 128, 300),
    workers: tuple[int, ...] = (2, 4, 8, 16, 32, 64),
    rounds: int = 5,
    seed: int = 0,
) -> None:
    jax.config.update("jax_num_cpu_devices", max(2, *workers))
    console = Console(width=110)
    caption = f"{hardware(jax.devices()[0])}; median of {rounds}"
    sizes = []
    for number in millions:
        sizes.append(row_of_size(number, rounds, seed))
        console.print(sizes[-1], highlight=False)  # the larger ones take minutes
    console.print(table("a step between two workers", sizes, caption))
    rows = [row_of_workers(n) for n in workers]
    console.print(table("bytes each sends, 2.1 M parameters; to compile", rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
