"""Optimizer steps that take turns: their times and memory."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import slamb_jax
from benchmarks.chips.traffic import traffic
from benchmarks.rivals import elements
from benchmarks.shapes import Shapes

AXIS = "data"
EXCHANGE = slamb_jax.Exchange(AXIS)
WARM_UP = 2  # turns that do not count
Make = Callable[[], optax.GradientTransformation]


class Workers(NamedTuple):
    """How many have all of the parameters: the devices of a mesh, or all on one."""

    number: int = 1
    mesh: Mesh | None = None

    def copies(self, tree: Any) -> Any:
        """One copy of each array for every worker."""
        if self.number == 1:
            return tree
        if self.mesh is None:
            return slamb_jax.simulated_replicas(tree, self.number)
        return slamb_jax.replicate(tree, self.mesh, EXCHANGE)


ALONE = Workers()


class Contestant:
    """A compiled step and the time and memory that it took."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: optax.Params,  # of one worker
        grads: Any,  # of all
        workers: Workers = ALONE,
    ) -> None:
        self.tx, self.workers = tx, workers
        state = params, tx.init(params)
        own = [x.size * x.dtype.itemsize for x in jax.tree.leaves(state[1])]
        self.copies = sum(own) / (4 * elements(params))  # of the parameters, as state
        start = time.perf_counter()
        lowered = step_of(tx, workers).lower(workers.copies(state), grads, None)
        self.trace_seconds = time.perf_counter() - start
        self.step: Any = lowered.compile()
        self.compile_seconds = time.perf_counter() - start  # with the trace
        memory: Any = self.step.memory_analysis()
        self.temporary = memory.temp_size_in_bytes / 2**20
        found = traffic(str(self.step.as_text()))
        self.kernels = found.kernels
        self.moved = found.bytes  # through the memory, of a GPU or a TPU
        self.passes = self.moved / (4 * elements(params) * workers.number)
        self.times: list[float] = []

    def take_turn(self, params: optax.Params, grads: Any) -> optax.Params:
        """Two steps from the parameters of one worker; the parameters of all.

        The second is timed: the first finds the caches as another contestant left them.
        """
        one = jax.tree.map(jnp.copy, params)  # they are donated
        state = self.workers.copies((one, self.tx.init(one)))
        state, _ = jax.block_until_ready(self.step(state, grads, None))
        start = time.perf_counter()
        state, _ = jax.block_until_ready(self.step(state, grads, None))
        self.times.append(time.perf_counter() - start)
        return state[0]

    def seconds(self) -> float:
        """The median."""
        return float(np.median(self.times[WARM_UP:]))


def step_of(tx: optax.GradientTransformation, workers: Workers) -> Any:
    """Update and apply of a state, gradients and no random key; donates the state."""

    def step(state: Any, grads: Any, key: None = None) -> Any:
        params, opt_state = state
        if workers.mesh is not None:
            grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    if workers.mesh is not None:
        return slamb_jax.per_worker_step(step, workers.mesh, EXCHANGE, check_vma=False)
    together = jax.vmap(step, axis_name=AXIS) if workers.number > 1 else step
    return jax.jit(together, donate_argnums=0)


def draw(shapes: Shapes, rng: np.random.Generator, scale: float) -> dict[str, Any]:
    """Random arrays of one worker."""
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32) * scale)
        for name, shape in shapes.items()
    }


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
    optimizers: dict[str, Make],
    shapes: Shapes,
    rounds: int,
    seed: int,
    workers: Workers,
    tell: Callable[[str], None],
) -> dict[str, Contestant]:
    """Has all take turns, ``rounds`` times after those that do not count.

    What is known of each when it is compiled is told at once. Where there are many
    cores several are compiled at a time.
    """

    rng = np.random.default_rng(seed)
    grads = workers.copies(draw(shapes, rng, 1.0))
    params = draw(shapes, rng, 0.02)

    def compiled(name: str) -> Contestant:
        c = Contestant(optimizers[name](), params, grads, workers)
        tell(
            f"{name}: compiled in {c.compile_seconds:.1f} s, {c.temporary:.0f} MiB of "
            f"temporaries, {c.passes:.1f} passes, {c.kernels} kernels"
        )
        return c

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        field = dict(zip(optimizers, pool.map(compiled, optimizers), strict=True))
    for _ in range(WARM_UP + rounds):
        for contestant in field.values():
            contestant.take_turn(params, grads)
    return field
