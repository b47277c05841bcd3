"""Optimizer steps that take turns on the same buffers: their times and memory."""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slamb_jax
from benchmarks.chips.traffic import traffic
from benchmarks.rivals import elements
from benchmarks.shapes import Shapes, abstract

AXIS = "data"
Make = Callable[[], optax.GradientTransformation]


class Workers(NamedTuple):
    """How many have all of the parameters: the devices of a mesh, or all on one."""

    number: int = 1
    mesh: Mesh | None = None


ALONE = Workers()


class Contestant:
    """A compiled step and the time and memory that it took."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        shapes: Shapes,
        workers: Workers = ALONE,
    ) -> None:
        params = abstract(shapes)
        state = params, jax.eval_shape(tx.init, params)
        own = [x.size * x.dtype.itemsize for x in jax.tree.leaves(state[1])]
        self.copies = sum(own) / (4 * elements(params))  # of the parameters, as state
        state, params = (on_workers(x, workers) for x in (state, params))
        start = time.perf_counter()
        lowered = step_of(tx, workers).lower(state, params, None)
        self.trace_seconds = time.perf_counter() - start
        self.step: Any = lowered.compile()
        self.compile_seconds = time.perf_counter() - start  # with the trace
        memory: Any = self.step.memory_analysis()
        self.temporary = memory.temp_size_in_bytes / 2**20
        found = traffic(str(self.step.as_text()))
        self.kernels = found.kernels
        self.moved = found.bytes  # through the memory, of a GPU or a TPU
        parameters = sum(map(math.prod, shapes.values()))
        self.passes = self.moved / (4 * parameters * workers.number)
        self.treedef: Any
        leaves, self.treedef = jax.tree.flatten(state)
        scalar = 1 if workers.number > 1 else 0  # dimensions of one for each worker
        arrays = [i for i, x in enumerate(leaves) if len(x.shape) > scalar]
        self.shared = arrays[: 3 * len(shapes)]  # places of p, m and v
        self.dtypes = [leaves[i].dtype for i in self.shared]
        for i in self.shared:
            leaves[i] = None
        # Not shared with the others: counts, anchors and other state of its own.
        self.own = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), leaves
        )
        self.times: list[float] = []
        self.peak = 0.0  # MiB above those held before the step

    def take_turn(self, arrays: list[jax.Array], grads: Any) -> list[jax.Array]:
        """Two steps on p, m, v (all leaves of each in turn); gives them back.

        The second is timed: the first finds the caches as another contestant left them.
        """
        leaves = self.own
        for i, x, dtype in zip(self.shared, arrays, self.dtypes, strict=True):
            leaves[i] = x.astype(dtype)
        state, _ = self.step(self.treedef.unflatten(leaves), grads, None)
        state = jax.block_until_ready(state)
        before = resident(reset=True)
        start = time.perf_counter()
        state, _ = jax.block_until_ready(self.step(state, grads, None))
        self.times.append(time.perf_counter() - start)
        self.peak = max(self.peak, resident() - before)
        self.own = jax.tree.leaves(state)
        arrays = [self.own[i] for i in self.shared]
        for i in self.shared:
            self.own[i] = None
        return arrays


def step_of(tx: optax.GradientTransformation, workers: Workers) -> Any:
    """Update and apply of a state, gradients and no random key; donates the state."""

    def step(state: Any, grads: Any, key: None = None) -> Any:
        params, opt_state = state
        if workers.mesh is not None:
            grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    if workers.mesh is not None:
        exchange = slamb_jax.Exchange(AXIS)
        return slamb_jax.per_worker_step(step, workers.mesh, exchange, check_vma=False)
    together = jax.vmap(step, axis_name=AXIS) if workers.number > 1 else step
    return jax.jit(together, donate_argnums=0)


def on_workers(tree: Any, workers: Workers) -> Any:
    """Shapes with one copy of each array for every worker."""
    if workers.number == 1:
        return tree
    mesh = workers.mesh
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            (workers.number, *x.shape), x.dtype, sharding=sharding
        ),
        tree,
    )


def draw(
    shapes: Shapes, rng: np.random.Generator, scale: float, workers: Workers = ALONE
) -> dict[str, Any]:
    """Random arrays; every worker has the same."""

    def place(x: Any) -> jax.Array:
        x = jnp.asarray(x * scale)
        if workers.number == 1:
            return x
        if workers.mesh is None:
            return jnp.stack([x] * workers.number)
        exchange = slamb_jax.Exchange(AXIS)
        return jax.tree.leaves(slamb_jax.replicate(x, workers.mesh, exchange))[0]

    return {
        name: place(rng.standard_normal(shape, np.float32))
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
    optimizers: dict[str, Make],
    shapes: Shapes,
    rounds: int,
    seed: int = 0,
    workers: Workers = ALONE,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Contestant]:
    """Has all take turns, ``rounds`` times after two that do not count.

    What is known of each when it is compiled is told at once. Where there are many
    cores several are compiled at a time.
    """
    rng = np.random.default_rng(seed)
    grads = draw(shapes, rng, 1.0, workers)

    def compiled(name: str) -> Contestant:
        c = Contestant(optimizers[name](), shapes, workers)
        tell(
            f"{name}: compiled in {c.compile_seconds:.1f} s, {c.temporary:.0f} MiB of "
            f"temporaries, {c.passes:.1f} passes, {c.kernels} kernels"
        )
        return c

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as pool:
        field = dict(zip(optimizers, pool.map(compiled, optimizers), strict=True))
    params = jax.tree.leaves(draw(shapes, rng, 0.02, workers))
    arrays = [*params, *(jnp.zeros_like(x) for x in [*params, *params])]
    del params
    for _ in range(rounds + 2):
        for contestant in field.values():
            arrays = contestant.take_turn(arrays, grads)
    return field


def seconds(times: list[float]) -> float:
    """The median, without the two first turns."""
    return float(np.median(times[2:]))
