"""Times one optimizer step (update and apply) on the shapes of a model.

Run from the root of the repository: ``python -m benchmarks.step --model bert-base``.
One worker, no axis: SLAMB computes its masks and packs its share, and sends nothing.
All optimizers take turns within one run; buffers are donated; medians.
"""

import dataclasses
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import slamb_jax
from benchmarks.shapes import MODELS
from examples.hardware import hardware


@dataclasses.dataclass(frozen=True)
class Config:
    """What to time."""

    model: Literal["resnet-110", "bert-base", "bert-large"] = "bert-base"
    rounds: int = 10
    seed: int = 0


OPTIMIZERS = {
    "optax.lamb": lambda: optax.lamb(1e-3),
    "optax.adamw": lambda: optax.adamw(1e-3),
    "slamb": lambda: slamb_jax.slamb(1e-3),
    "slamb, product form": lambda: slamb_jax.slamb(1e-3, form="product"),
    "slamb, bfloat16 momentum": lambda: slamb_jax.slamb(1e-3, mu_dtype=jnp.bfloat16),
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


def main(config: Config) -> None:
    rng = np.random.default_rng(config.seed)

    def draw(scale: float) -> dict[str, jax.Array]:
        return {
            name: jnp.asarray(rng.standard_normal(shape, np.float32) * scale)
            for name, shape in MODELS[config.model].items()
        }

    def program(name: str):
        tx = OPTIMIZERS[name]()

        def step(state, grads):
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params = draw(0.02)
        state = params, tx.init(params)
        start = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=0).lower(state, params).compile()
        return compiled, state, time.perf_counter() - start

    grads = draw(1.0)
    d = sum(x.size for x in grads.values())
    # g, m, v, p read; m, v, p written; m, v, p once more behind the norms; the packed
    # tenth written and read: 10.2 passes of 4 bytes.
    speed = bandwidth(min(d, 2**26))
    floor = 10.2 * 4 * d / speed
    programs = {name: program(name) for name in OPTIMIZERS}
    states = {name: p[1] for name, p in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(config.rounds + 2):
        for name, (compiled, _, _) in programs.items():
            start = time.perf_counter()
            states[name] = jax.block_until_ready(compiled(states[name], grads))
            times[name].append(time.perf_counter() - start)

    table = Table(
        title=f"{config.model}: {d / 1e6:.1f} M parameters in {len(grads)} leaves",
        caption=f"{hardware(jax.devices()[0])}; {speed / 1e9:.1f} GB/s copied; "
        f"median of {config.rounds}",
    )
    for head in ("optimizer", "ms", "/ lamb", "/ floor", "temporary MiB", "compile s"):
        table.add_column(head, justify="left" if head == "optimizer" else "right")
    lamb = float(np.median(times["optax.lamb"][2:]))
    for name, (compiled, _, compile_seconds) in programs.items():
        seconds = float(np.median(times[name][2:]))
        memory = compiled.memory_analysis()
        table.add_row(
            name,
            f"{seconds * 1000:.1f}",
            f"{seconds / lamb:.2f}",
            f"{seconds / floor:.2f}",
            f"{memory.temp_size_in_bytes / 2**20:.0f}",
            f"{compile_seconds:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
