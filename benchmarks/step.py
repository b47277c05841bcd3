"""Times one optimizer step (update and apply) on the shapes of models.

Run from the root of the repository: ``python -m benchmarks.step --model bert-base``.
One worker, no axis: SLAMB computes its ages and packs its share, and sends nothing.
With ``--workers 4`` that many devices each step on their own gradients: optax's
optimizers average them first, and ours do all of their exchange; the table then has the
bytes that each worker sends. On a GPU or a TPU it also has the passes over the
parameters that the compiled step makes, and their share of the memory's bandwidth. All
optimizers take turns of two steps within one run; medians of the second steps.
``leaves-400`` is a Transformer whose layers are not scanned, ``squares-16m`` are square
matrices of so many million parameters.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.race import ALONE, AXIS, Contestant, Make, Workers, bandwidth, race
from benchmarks.rivals import chains, elements
from benchmarks.shapes import MODELS, Shapes, abstract
from examples.common.optimizers import dense
from examples.common.options import check_names
from examples.common.processes import local_mesh
from examples.common.tables import table
from examples.common.traffic import report_of
from examples.hardware import hardware
from slamb_jax import Exchange

RATE = 1e-3
DENSE: dict[str, Make] = {
    "optax.lamb": lambda: optax.lamb(RATE),
    "optax.adamw": lambda: optax.adamw(RATE),
}


def optimizers(workers: int) -> dict[str, Make]:
    """All of them, optax's first, by the names in the tables."""
    axis = AXIS if workers > 1 else None
    exchange, paper = Exchange(axis), Exchange.paper(axis)

    def averaged(make: Make) -> Make:
        return lambda: dense(make(), AXIS)

    def adamw(**settings: Any) -> Make:
        return lambda: slamb_jax.adamw(RATE, Exchange(axis, **settings))

    def slamb(**settings: Any) -> Make:
        return lambda: slamb_jax.slamb(RATE, paper, **settings)

    makes = {
        **{x: averaged(make) if axis else make for x, make in DENSE.items()},
        "adamw": adamw(),
        "adamw, skip_not_finite": lambda: slamb_jax.skip_not_finite(
            adamw()(), exchange
        ),
        "lamb": lambda: slamb_jax.lamb(RATE, exchange),
        "slamb, as published": slamb(),
        "slamb, product form": slamb(form="product"),
        "slamb, bfloat16 momentum": slamb(mu_dtype=jnp.bfloat16),
        # Links in a row, which keep the direction between them.
        "slamb, flat chain": lambda: chains.slamb(RATE, paper),
    }
    if axis:
        outer = optax.sgd(0.7, 0.5, nesterov=True)
        makes["adamw, in 4 bits"] = adamw(payload="uniform4")
        makes["adamw, in float32"] = adamw(payload=None)
        makes["adamw, largest of 7"] = adamw(payload="largest_of_7")
        makes["adamw, outer"] = adamw(sync_every=30, outer=outer)
    return makes


@dataclasses.dataclass(frozen=True)
class Config:
    """The steps to time."""

    model: tuple[Literal[tuple(MODELS)], ...] = ("bert-base",)  # type: ignore[valid-type]
    """models whose shapes to take"""
    workers: int = 1
    """devices, each with all of the parameters"""
    simulate: bool = False
    """all workers on one device, which encodes and decodes for all of them"""
    only: tuple[str, ...] = ()
    """names of optimizers, beside optax's two; none: all"""
    rounds: int = 10
    seed: int = 0


def cells(
    name: str, field: dict[str, Contestant], d: int, speed: float
) -> dict[str, str]:
    """The row of one optimizer."""
    c, took = field[name], {key: x.seconds() for key, x in field.items()}
    own = took[name]
    row = {
        "optimizer": name,
        "ms": f"{own * 1000:.1f}",
        "ns a parameter": f"{own / d * 1e9:.2f}",
        "/ lamb": f"{own / took['optax.lamb']:.2f}",
        "/ adamw": f"{own / took['optax.adamw']:.2f}",
        "state / p": f"{c.copies:.2f}",
        "temporary MiB": f"{c.temporary:.0f}",
        "trace, compile s": f"{c.trace_seconds:.1f}, {c.compile_seconds:.1f}",
        "kernels": f"{c.kernels}",
    }
    if jax.default_backend() != "cpu":  # whose caches would hide much
        row["passes"] = f"{c.passes:.1f}"
        row["of bandwidth"] = f"{c.moved / own / speed:.0%}"
    return row


def kilobytes(make: Make, shapes: Shapes, workers: Workers) -> str:
    """What each worker sends in a step, without averages of the parameters."""
    if workers.mesh is None:
        return "-"
    report = report_of(make(), Exchange(AXIS), abstract(shapes), workers.mesh)
    return f"{report.bytes_sent() / 1e3:.1f}"


def main(config: Config) -> None:
    workers, known = ALONE, optimizers(config.workers)
    check_names("--only", config.only, known)
    if config.workers > 1:
        mesh = None if config.simulate else local_mesh(config.workers)
        workers = Workers(config.workers, mesh)
    chosen = {name: known[name] for name in (*DENSE, *(config.only or known))}
    console, speed = Console(width=150), bandwidth(2**28)
    machine = f"{hardware(jax.devices()[0])}; {speed / 1e9:.1f} GB/s copied"
    for model in config.model:
        shapes: Shapes = MODELS[model]
        d = elements(abstract(shapes))
        field = race(chosen, shapes, config.rounds, config.seed, workers, console.print)
        rows = [cells(name, field, d, speed) for name in field]
        for row in rows if config.workers > 1 else ():
            row["kB sent"] = kilobytes(chosen[row["optimizer"]], shapes, workers)
        leaves = f"{d / 1e6:.1f} M parameters in {len(shapes)} leaves"
        title = f"{model}: {leaves}, workers: {config.workers}"
        caption = f"{machine}; median of {config.rounds}, seed {config.seed}"
        console.print(table(title, rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
