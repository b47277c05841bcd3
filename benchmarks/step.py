"""Times one optimizer step (update and apply) on the shapes of a model.

Run from the root of the repository: ``python -m benchmarks.step --model bert-base``.
One worker, no axis: SLAMB computes its ages and packs its share, and sends nothing.
All optimizers take turns within one run, on the same donated buffers; medians.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.kernels import kernels
from benchmarks.rivals import elements
from benchmarks.shapes import MODELS, Shapes, abstract
from examples.common.optimizers import slamb_from_links
from examples.common.tables import table
from examples.hardware import hardware

RATE = 1e-3
# g, m, v, p read; m, v, p written; m, v, p read once more, behind the norms; the packed
# tenth written and read: passes over d elements of 4 bytes.
PASSES = 10.2
Make = Callable[[], optax.GradientTransformation]


def slamb(selection: str = "strided", **settings: Any) -> Make:
    exchange = slamb_jax.Exchange.paper(selection=selection)
    return lambda: slamb_jax.slamb(RATE, exchange, **settings)


OPTIMIZERS: dict[str, Make] = {
    "optax.lamb": lambda: optax.lamb(RATE),
    "optax.adamw": lambda: optax.adamw(RATE),
    "adamw": lambda: slamb_jax.adamw(RATE, slamb_jax.Exchange()),
    "slamb": slamb(),
    "slamb, product form": slamb(form="product"),
    "slamb, bfloat16 momentum": slamb(mu_dtype=jnp.bfloat16),
}
SLOW = {
    "slamb, permutation": slamb("permutation"),
    "slamb, bernoulli": slamb("bernoulli"),
}
CHAIN = {  # the direction is kept in memory between the links
    "slamb, chain of links": lambda: slamb_from_links(RATE, slamb_jax.Exchange.paper())
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time."""

    model: Literal[tuple(MODELS)] = "bert-base"  # type: ignore[valid-type]
    """the model whose shapes to take"""
    rounds: int = 10
    chain: bool = False  # time SLAMB as a chain of its links too
    slow: bool = False  # time the two slow selections too
    seed: int = 0


class Contestant:
    """A compiled step and the time and memory that it took."""

    def __init__(self, tx: optax.GradientTransformation, shapes: Shapes) -> None:
        params = abstract(shapes)
        state = params, jax.eval_shape(tx.init, params)

        def step(state: Any, grads: Any) -> Any:
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        start = time.perf_counter()
        self.step: Any = jax.jit(step, donate_argnums=0).lower(state, params).compile()
        self.compile_seconds = time.perf_counter() - start
        memory: Any = self.step.memory_analysis()
        self.temporary = memory.temp_size_in_bytes / 2**20
        self.kernels = kernels(str(self.step.as_text()))
        self.treedef: Any
        leaves, self.treedef = jax.tree.flatten(state)
        arrays = [i for i, x in enumerate(leaves) if x.shape]
        self.shared = arrays[: 3 * len(shapes)]  # places of p, m and v
        self.dtypes = [leaves[i].dtype for i in self.shared]
        for i in self.shared:
            leaves[i] = None
        # What only this one has: counts.
        self.own = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), leaves)
        self.times: list[float] = []
        self.peak = 0.0  # MiB above what was held before the step

    def take_turn(self, arrays: list[jax.Array], grads: Any) -> list[jax.Array]:
        """One timed step on p, m, v (all leaves of each in turn); gives them back."""
        leaves = self.own
        for i, x, dtype in zip(self.shared, arrays, self.dtypes, strict=True):
            leaves[i] = x.astype(dtype)
        state = jax.block_until_ready(self.treedef.unflatten(leaves))
        before = resident(reset=True)
        start = time.perf_counter()
        state = jax.block_until_ready(self.step(state, grads))
        self.times.append(time.perf_counter() - start)
        self.peak = max(self.peak, resident() - before)
        self.own = jax.tree.leaves(state)
        arrays = [self.own[i] for i in self.shared]
        for i in self.shared:
            self.own[i] = None
        return arrays


def draw(shapes: Shapes, rng: np.random.Generator, scale: float) -> dict[str, Any]:
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32) * scale)
        for name, shape in shapes.items()
    }


def resident(*, reset: bool = False) -> float:
    """The most MiB the process held since the last reset; 0 where it is not known."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        if reset:
            clear.write_text("5")
        lines = status.read_text().splitlines()
    except OSError:
        return 0.0
    (line,) = [x for x in lines if x.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def bandwidth(elements: int) -> float:
    """Bytes per second that a large array is read and written with, in place."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.block_until_ready(add(jnp.zeros(elements)))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        x = jax.block_until_ready(add(x))
        times.append(time.perf_counter() - start)
    return 8 * elements / float(np.median(times))


def race(
    optimizers: dict[str, Make], shapes: Shapes, rounds: int, seed: int = 0
) -> dict[str, Contestant]:
    """Has all take turns, ``rounds`` times after two that do not count."""
    rng = np.random.default_rng(seed)
    grads = draw(shapes, rng, 1.0)
    field = {name: Contestant(make(), shapes) for name, make in optimizers.items()}
    params = jax.tree.leaves(draw(shapes, rng, 0.02))
    arrays = [*params, *(jnp.zeros_like(x) for x in [*params, *params])]
    del params
    for _ in range(rounds + 2):
        for contestant in field.values():
            arrays = contestant.take_turn(arrays, grads)
    return field


def seconds(times: list[float]) -> float:
    """The median, without the two first turns."""
    return float(np.median(times[2:]))


def main(config: Config) -> None:
    shapes = MODELS[config.model]
    d, speed = elements(abstract(shapes)), bandwidth(2**28)
    floor = PASSES * 4 * d / speed
    chosen = dict(OPTIMIZERS)
    chosen |= CHAIN if config.chain else {}
    chosen |= SLOW if config.slow else {}
    field = race(chosen, shapes, config.rounds, config.seed)
    lamb = seconds(field["optax.lamb"].times)
    rows = []
    for name, c in field.items():
        took = seconds(c.times)
        rows.append(
            {
                "optimizer": name,
                "ms": f"{took * 1000:.1f}",
                "/ lamb": f"{took / lamb:.2f}",
                "/ floor": f"{took / floor:.2f}",
                "temporary MiB": f"{c.temporary:.0f}",
                "measured MiB": f"{c.peak:.0f}",
                "compile s": f"{c.compile_seconds:.1f}",
                "kernels": f"{c.kernels}",
            }
        )
    title = f"{config.model}: {d / 1e6:.1f} M parameters in {len(shapes)} leaves"
    caption = (
        f"{hardware(jax.devices()[0])}; {speed / 1e9:.1f} GB/s copied, floor "
        f"{floor * 1000:.1f} ms; median of {config.rounds}, seed {config.seed}"
    )
    Console(width=110).print(table(title, rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
