"""Ways to send fewer bytes than the default, tried before any of them is built.

Run from the root of the repository: ``python -m benchmarks.fewer_bytes``. AdamW on the
frontier's job, with all parameters in one vector: what the codes stand for is computed,
and no bytes are made, so that a way to send is a line of ``TRIALS``. Runs that are in
the results are not made again. A run of 300 steps takes a core a minute.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.flatten_util import ravel_pytree
from rich.console import Console

from benchmarks.fewer_bytes.codes import CODES
from benchmarks.fewer_bytes.step import Leaves, first_state, step_of
from benchmarks.fewer_bytes.trials import TRIALS
from benchmarks.frontier.results import Results
from benchmarks.frontier.tasks import TASKS, task
from examples.common.options import check_names
from examples.common.tables import spread, table
from examples.hardware import hardware

TOGETHER = 2  # workers whose gradients are computed at a time
RESULTS = Path("benchmarks", "fewer_bytes", "fewer_bytes.jsonl")


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    only: tuple[str, ...] = tuple(TRIALS)
    task: str = "byte_lm"
    """byte_lm_apart has files of their own for each of eight workers"""
    workers: int = 8
    batch: int = 8
    """sequences of each worker"""
    steps: int = 300
    rates: tuple[float, ...] = (0.008,)
    seeds: tuple[int, ...] = (0,)
    out: Path = RESULTS.parent
    """where fewer_bytes.jsonl is, or will be: elsewhere all is run anew"""


@functools.lru_cache(maxsize=1)
def program(
    name: str, of_task: str, workers: int, steps: int
) -> Callable[..., jax.Array]:
    """A whole run: parameters, batches and rates to the evaluation loss."""
    of = task(of_task)
    shapes = jax.eval_shape(of.init, jax.random.key(0))
    _, tree_of = ravel_pytree(
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    )
    trial, leaves = TRIALS[name], Leaves(shapes)
    step = step_of(trial, leaves)

    def gradients(params: jax.Array, batch: jax.Array) -> jax.Array:
        def gradient(batch: jax.Array) -> jax.Array:
            return jax.grad(lambda x: of.loss(tree_of(x), batch))(params)

        each = len(batch) // workers
        batch = batch.reshape(-1, TOGETHER, each, *batch.shape[1:])
        return jax.lax.map(jax.vmap(gradient), batch).reshape(workers, -1)

    def run(params: jax.Array, batches: jax.Array, rates: jax.Array) -> jax.Array:
        def body(state: Any, now: Any) -> tuple[Any, None]:
            t, rate, batch = now
            return step(state, gradients(state.params, batch), t, rate), None

        state = first_state(params, workers, trial, leaves)
        state, _ = jax.lax.scan(body, state, (jnp.arange(1, steps + 1), rates, batches))
        return of.loss(tree_of(state.params), of.held_out)

    return jax.jit(run)


def loss(name: str, rate: float, seed: int, config: Config) -> float:
    """The evaluation loss in the end."""
    of, workers, steps = task(config.task), config.workers, config.steps
    params, _ = ravel_pytree(of.init(jax.random.key(seed)))
    batches = np.stack(list(of.batches(workers * config.batch, steps, seed)))
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
    rates = rate * np.array([shape(t) for t in range(steps)], np.float32)
    return float(program(name, config.task, workers, steps)(params, batches, rates))


def energy_left() -> list[dict[str, str]]:
    """Of normal numbers in codes: bits each, and the energy of what rounding takes."""
    x, rows = jax.random.normal(jax.random.key(0), (1, 2**20)), []
    for payload, code in CODES.items():
        y, bits = jax.jit(code.stands_for)(x), code.bits_with_scale
        left = jnp.sum((x - y) ** 2) / jnp.sum(x**2)
        row = {"": payload, "bits": f"{bits:.2f}", "left": f"{left:.3f}"}
        rows.append(row | {"the least, by Shannon": f"{2 ** (-2 * bits):.3f}"})
    return rows


def main(config: Config) -> None:
    check_names("--only", config.only, tuple(TRIALS))
    check_names("--task", (config.task,), tuple(TASKS))
    if config.workers < 1 or config.workers % TOGETHER:
        raise SystemExit(f"--workers: {config.workers} is no multiple of {TOGETHER}")
    results, rows = Results(config.out / RESULTS.name), []
    for name in config.only:
        for rate in config.rates:
            losses = []
            for seed in config.seeds:
                key = {
                    "trial": name, "task": config.task, "workers": config.workers,
                    "batch": config.batch, "steps": config.steps, "rate": rate,
                    "seed": seed,
                }  # fmt: skip
                run = functools.partial(loss, name, rate, seed, config)
                losses.append(results.once(key, run))
            row = {"": name, "rate": f"{rate:g}", "loss": spread(losses)}
            rows.append(row)
    seeds = ", ".join(map(str, config.seeds))
    caption = (
        f"{config.task}, {config.workers} workers x {config.batch}, {config.steps} "
        f"steps, seeds {seeds}; {hardware(jax.devices()[0])}"
    )
    console = Console(width=100)
    console.print(table("Fewer bytes", rows, caption))
    console.print(table("Normal numbers in codes", energy_left()))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
