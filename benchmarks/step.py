"""Times one optimizer step (update and apply) on the shapes of a model.

Run from the root of the repository: ``python benchmarks/step.py --model bert-base``.
One worker, no axis: SLAMB computes its ages and packs its share, and sends nothing.
All optimizers take turns within one run, on the same donated buffers; medians. With
PyTorch installed, a plain PyTorch LAMB takes its turn too.
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
from rich.table import Table

import slamb_jax
from benchmarks.kernels import kernels
from benchmarks.shapes import MODELS, Shapes
from benchmarks.torch_lamb import TorchLamb, torch
from examples.hardware import hardware

OPTIMIZERS = {
    "optax.lamb": lambda: optax.lamb(1e-3),
    "optax.adamw": lambda: optax.adamw(1e-3),
    "slamb": lambda: slamb_jax.slamb(1e-3),
    "slamb, product form": lambda: slamb_jax.slamb(1e-3, form="product"),
    "slamb, bfloat16 momentum": lambda: slamb_jax.slamb(1e-3, mu_dtype=jnp.bfloat16),
    "slamb, permutation": lambda: slamb_jax.slamb(1e-3, selection="permutation"),
    "slamb, bernoulli": lambda: slamb_jax.slamb(1e-3, selection="bernoulli"),
}
SLOW = ("slamb, permutation", "slamb, bernoulli")
# g, m, v, p read; m, v, p written; m, v, p read once more, behind the norms; the packed
# tenth written and read: passes over d elements of 4 bytes.
PASSES = 10.2


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time."""

    model: Literal[tuple(MODELS)] = "bert-base"  # type: ignore[valid-type]
    rounds: int = 10
    slow: bool = False
    """Time the two slow selections too."""
    seed: int = 0


@dataclasses.dataclass
class Contestant:
    """A compiled step and what it took."""

    step: Callable[[Any, Any], Any]
    treedef: Any
    dtypes: list[Any]  # of the leaves of its state
    counts: dict[int, jax.Array]  # scalars of its state, by place
    compile_seconds: float
    temporary: float  # MiB
    kernels: int
    times: list[float] = dataclasses.field(default_factory=list)
    peak: float = 0.0  # MiB above what was held before the step


def draw(shapes: Shapes, rng: np.random.Generator, scale: float) -> dict[str, Any]:
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32) * scale)
        for name, shape in shapes.items()
    }


def compile_step(tx: optax.GradientTransformation, shapes: Shapes) -> Contestant:
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    state = params, jax.eval_shape(tx.init, params)

    def step(state: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, params).compile()
    seconds = time.perf_counter() - start
    leaves, treedef = jax.tree.flatten(state)
    counts = {i: jnp.zeros((), x.dtype) for i, x in enumerate(leaves) if x.shape == ()}
    memory = compiled.memory_analysis()
    return Contestant(
        compiled,
        treedef,
        [x.dtype for x in leaves],
        counts,
        seconds,
        memory.temp_size_in_bytes / 2**20,
        kernels(compiled.as_text()),
    )


def take_turn(contestant: Contestant, arrays: list[Any], grads: Any) -> list[Any]:
    """One timed step on p, m, v (all leaves of each in turn); gives them back."""
    given, counts = iter(arrays), contestant.counts
    leaves = [
        counts[i] if i in counts else next(given).astype(dtype)
        for i, dtype in enumerate(contestant.dtypes)
    ]
    state = jax.block_until_ready(contestant.treedef.unflatten(leaves))
    del leaves
    before = _resident(reset=True)
    start = time.perf_counter()
    state = jax.block_until_ready(contestant.step(state, grads))
    contestant.times.append(time.perf_counter() - start)
    contestant.peak = max(contestant.peak, _resident() - before)
    leaves = jax.tree.leaves(state)
    contestant.counts = {i: leaves[i] for i in contestant.counts}
    return [x for i, x in enumerate(leaves) if i not in contestant.counts]


def _resident(*, reset: bool = False) -> float:
    """The most MiB the process held since the last reset; 0 where it is not told."""
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


def main(config: Config) -> None:
    shapes = MODELS[config.model]
    rng = np.random.default_rng(config.seed)
    grads = draw(shapes, rng, 1.0)
    d = sum(x.size for x in grads.values())
    speed = bandwidth(2**28)
    floor = PASSES * 4 * d / speed
    field = {
        name: compile_step(make(), shapes)
        for name, make in OPTIMIZERS.items()
        if config.slow or name not in SLOW
    }
    params = [x for _, x in sorted(draw(shapes, rng, 0.02).items())]
    moments = [jnp.zeros_like(x) for x in params], [jnp.zeros_like(x) for x in params]
    arrays = [*params, *moments[0], *moments[1]]
    del params, moments
    torch_lamb = TorchLamb(shapes) if torch else None
    host_grads = {name: np.array(g) for name, g in grads.items()}
    for _ in range(config.rounds + 2):
        for contestant in field.values():
            arrays = take_turn(contestant, arrays, grads)
        if torch_lamb:
            torch_lamb.take_turn(host_grads)

    lamb = float(np.median(field["optax.lamb"].times[2:]))
    table = Table(
        title=f"{config.model}: {d / 1e6:.1f} M parameters in {len(grads)} leaves",
        caption=f"{hardware(jax.devices()[0])}; {speed / 1e9:.1f} GB/s copied, floor "
        f"{floor * 1000:.1f} ms; median of {config.rounds}, seed {config.seed}",
    )
    heads = "optimizer", "ms", "/ lamb", "/ floor", "temporary MiB", "measured MiB"
    for head in (*heads, "compile s", "kernels"):
        table.add_column(head, justify="left" if head == "optimizer" else "right")
    for name, contestant in field.items():
        seconds = float(np.median(contestant.times[2:]))
        table.add_row(
            name,
            f"{seconds * 1000:.1f}",
            f"{seconds / lamb:.2f}",
            f"{seconds / floor:.2f}",
            f"{contestant.temporary:.0f}",
            f"{contestant.peak:.0f}",
            f"{contestant.compile_seconds:.1f}",
            f"{contestant.kernels}",
        )
    if torch_lamb:
        seconds = float(np.median(torch_lamb.times[2:]))
        name = f"LAMB, PyTorch {torch.__version__}"
        ratios = f"{seconds / lamb:.2f}", f"{seconds / floor:.2f}"
        table.add_row(name, f"{seconds * 1000:.1f}", *ratios, *"----")
    Console(width=110).print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
