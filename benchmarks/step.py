"""Times one optimizer step (update and apply) on the shapes of a model.

Run from the root of the repository: ``python -m benchmarks.step --model bert-base``.
One worker, no axis: SLAMB computes its ages and packs its share, and sends nothing.
With ``--workers 4`` that many devices each step on their own gradients: optax's
optimizers average them first, and ours do all of their exchange. Where there are fewer
devices, all workers are simulated on one, which encodes and decodes for all of them. On
a GPU or a TPU the table also says how many passes over the parameters the compiled step
makes, and their share of the memory's bandwidth. All optimizers take turns
of two steps within one run, on the same donated buffers; medians of the second steps.
``--before ../older`` has the optimizers of another checkout take turns with these.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.checkouts import package
from benchmarks.race import ALONE, AXIS, Make, Workers, bandwidth, race, seconds
from benchmarks.rivals import elements
from benchmarks.shapes import MODELS, abstract
from examples.common.optimizers import dense
from examples.common.options import check_names
from examples.common.processes import local_mesh
from examples.common.tables import table
from examples.hardware import hardware

RATE = 1e-3
# g, m, v, p read; m, v, p written; m, v, p read once more, after the norms; the packed
# tenth written and read: passes over d elements of 4 bytes.
PASSES = 10.2


DENSE: dict[str, Make] = {
    "optax.lamb": lambda: optax.lamb(RATE),
    "optax.adamw": lambda: optax.adamw(RATE),
}


def averaged(make: Make) -> Make:
    return lambda: dense(make(), AXIS)


def skipping(exchange: Any, library: Any) -> optax.GradientTransformation:
    return library.skip_not_finite(library.adamw(RATE, exchange), exchange)


def alone(library: Any = slamb_jax) -> dict[str, Make]:
    """The optimizers of the package, or of another checkout's, on one worker."""

    def slamb(**settings: Any) -> Make:
        return lambda: library.slamb(RATE, library.Exchange.paper(), **settings)

    makes: dict[str, Make] = {
        "adamw": lambda: library.adamw(RATE, library.Exchange()),
        "adamw, skip_not_finite": lambda: skipping(library.Exchange(), library),
        "lamb": lambda: lamb_of(library)(RATE, library.Exchange()),
        "slamb": slamb(),
        "slamb, product form": slamb(form="product"),
        "slamb, bfloat16 momentum": slamb(mu_dtype=jnp.bfloat16),
    }
    if hasattr(library, "elementwise_rescale"):
        makes["slamb, flat chain"] = lambda: flat_slamb(
            library.Exchange.paper(), library
        )
    return makes


def lamb_of(library: Any) -> Callable[..., optax.GradientTransformation]:
    """LAMB in codes, which another checkout may have as ``slamb``."""
    lamb = getattr(library, "lamb", None)  # there it may be a module
    make: Callable[..., optax.GradientTransformation]
    make = lamb if callable(lamb) else library.slamb
    return make


def flat_slamb(
    exchange: Any, library: Any = slamb_jax
) -> optax.GradientTransformationExtraArgs:
    """SLAMB as links in a row, which keep the direction between them."""
    return optax.chain(
        library.mask_momentum(exchange, library.directions.adam(1e-6), 0.9, 0.999),
        library.layerwise_trust_ratio(exchange, b3=0.93),
        library.elementwise_rescale(exchange, b3=0.93),
        optax.scale_by_learning_rate(RATE),
        library.average_parameters_every(exchange),
    )


OPTIMIZERS = DENSE | alone()


def exchanging(library: Any = slamb_jax) -> dict[str, Make]:
    """The optimizers of several workers, with all of the exchange."""
    # Another checkout may be of a time when the setting had another name.
    payload = next(
        name
        for name in ("average_payload", "payload")
        if hasattr(library.Exchange, name)
    )

    def averaging(**settings: Any) -> Make:
        return lambda: library.adamw(RATE, library.Exchange(AXIS, **settings))

    return {
        "adamw": averaging(),
        "adamw, skip_not_finite": lambda: skipping(library.Exchange(AXIS), library),
        "adamw, in uniform4": averaging(**{payload: "uniform4"}),
        "adamw, in float32": averaging(**{payload: None}),
        "lamb": lambda: lamb_of(library)(RATE, library.Exchange(AXIS)),
        "slamb, as published": lambda: library.slamb(
            RATE, library.Exchange.paper(AXIS)
        ),
    }


@dataclasses.dataclass(frozen=True)
class Config:
    """The steps to time."""

    model: Literal[tuple(MODELS)] = "bert-base"  # type: ignore[valid-type]
    """the model whose shapes to take"""
    workers: int = 1
    """devices, or simulated ones, each with all of the parameters"""
    only: tuple[str, ...] = ()
    """names of optimizers, beside optax's two; none: all"""
    rounds: int = 10
    before: Path | None = None
    """another checkout of this repository, whose optimizers take turns with these"""
    seed: int = 0


def main(config: Config) -> None:
    shapes, workers = MODELS[config.model], ALONE
    if config.workers == 1:
        chosen, ours = dict(DENSE), alone
    else:
        simulated = len(jax.devices()) < config.workers
        mesh = None if simulated else local_mesh(config.workers)
        workers = Workers(config.workers, mesh)
        chosen = {name: averaged(make) for name, make in DENSE.items()}
        ours = exchanging
    chosen |= ours()
    if config.before is not None:
        before = ours(package(config.before))
        chosen |= {f"{name}, before": make for name, make in before.items()}
    check_names("--only", config.only, chosen)
    if config.only:
        chosen = {name: chosen[name] for name in (*config.only, *DENSE)}
    d, speed = elements(abstract(shapes)), bandwidth(2**28)
    floor = PASSES * 4 * d * config.workers / speed
    console = Console(width=130)
    tell = functools.partial(console.print, highlight=False)
    field = race(chosen, shapes, config.rounds, config.seed, workers, tell)
    lamb, adamw = (seconds(field[f"optax.{name}"].times) for name in ("lamb", "adamw"))
    rows = []
    on_chip = jax.default_backend() != "cpu"  # whose caches would hide much
    for name, c in field.items():
        took = seconds(c.times)
        moved = {
            "passes": f"{c.passes:.1f}",
            "of bandwidth": f"{c.moved / took / speed:.0%}",
        }
        rows.append(
            {
                "optimizer": name,
                "ms": f"{took * 1000:.1f}",
                "/ lamb": f"{took / lamb:.2f}",
                "/ adamw": f"{took / adamw:.2f}",
                "/ floor": f"{took / floor:.2f}",
                "state / p": f"{c.copies:.2f}",
                "temporary MiB": f"{c.temporary:.0f}",
                "measured MiB": f"{c.peak:.0f}",
                "compile s": f"{c.compile_seconds:.1f}",
                "kernels": f"{c.kernels}",
            }
            | (moved if on_chip else {})
        )
    title = (
        f"{config.model}: {d / 1e6:.1f} M parameters in {len(shapes)} leaves, "
        f"workers: {config.workers}"
    )
    caption = (
        f"{hardware(jax.devices()[0])}; {speed / 1e9:.1f} GB/s copied, floor "
        f"{floor * 1000:.1f} ms; median of {config.rounds}, seed {config.seed}"
    )
    console.print(table(title, rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
