"""Cost against size: a step's time by parameters, its bytes by workers.

Run from the root of the repository: ``python -m benchmarks.scaling``. Time: update and
apply of SLAMB on square leaves of 1 M to 400 M parameters in all, medians. Bytes: what
each worker sends, read off the program compiled for 2 to 64 workers (CPU devices).
"""

import dataclasses
import math
import os
import time
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=64"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import slamb_jax
from benchmarks.shapes import Shapes
from examples.hardware import hardware

AXIS = "data"


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


def compile_step(shapes: Shapes, rng: np.random.Generator) -> tuple[Any, Any, Any]:
    tx = slamb_jax.slamb(1e-3)

    def step(state: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def draw(scale: float) -> dict[str, jax.Array]:
        return {
            k: jnp.asarray(rng.standard_normal(s, np.float32) * scale)
            for k, s in shapes.items()
        }

    params, grads = draw(0.02), draw(1.0)
    state = params, tx.init(params)
    return jax.jit(step, donate_argnums=0).lower(state, grads).compile(), state, grads


def step_times(config: Config) -> dict[int, float]:
    """Seconds a step, by parameters; one size at a time in memory."""
    out = {}
    for millions in config.millions:
        rng = np.random.default_rng(config.seed)
        step, state, grads = compile_step(shapes_of(millions), rng)
        times = []
        for _ in range(config.rounds + 2):
            start = time.perf_counter()
            state = jax.block_until_ready(step(state, grads))
            times.append(time.perf_counter() - start)
        out[sum(math.prod(s) for s in shapes_of(millions).values())] = float(
            np.median(times[2:])
        )
        del step, state, grads
    return out


def bytes_sent(workers: int) -> tuple[float, float]:
    """What each worker sends at every step, and in the average of the parameters."""
    mesh = Mesh(np.array(jax.devices()[:workers]), (AXIS,))
    tx = slamb_jax.slamb(1e-3, axis_name=AXIS)
    params = {k: jnp.zeros(s) for k, s in shapes_of(2).items()}

    def step(state: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jnp.zeros(())

    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
    grads = {k: jnp.zeros((workers * s[0], *s[1:])) for k, s in shapes_of(2).items()}
    lowered = slamb_jax.per_worker_step(step, mesh, AXIS).lower(state, grads)
    report = slamb_jax.wire_report(lowered)
    always = report.bytes_sent(conditional=False)
    return always, report.bytes_sent(conditional=True)


def main(config: Config) -> None:
    console = Console(width=110)
    table = Table(
        title="a step of SLAMB, one worker",
        caption=f"{hardware(jax.devices()[0])}; median of {config.rounds}",
    )
    for head in ("parameters", "ms", "ns a parameter"):
        table.add_column(head, justify="right")
    for d, seconds in step_times(config).items():
        table.add_row(f"{d:,}", f"{seconds * 1e3:.1f}", f"{seconds / d * 1e9:.2f}")
    console.print(table)

    table = Table(title="bytes each worker sends, 2.1 M parameters, k = 0.1")
    heads = "workers", "a step", "/ (n-1)/n", "an average"
    for head in heads:
        table.add_column(head, justify="right")
    for n in config.workers:
        step, average = bytes_sent(n)
        ring = f"{step * n / (n - 1):,.0f}"
        table.add_row(f"{n}", f"{step:,.0f}", ring, f"{average:,.0f}")
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
