"""What the distribution learns: the estimator's variance, beside uniform draws."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

from examples.common.tables import table
from slamb_jax import Exchange, jointspar

LAYERS, BUDGET, RUNS = 12, 6.0, 20
NORMS = np.geomspace(1, 10, LAYERS).astype(np.float32)


def variance(log_p: jax.Array) -> jax.Array:
    r""":math:`\sum_d \|g_d\|^2 / p_d`, over that of the uniform distribution."""
    uniform = np.sum(np.square(NORMS)) * LAYERS / BUDGET
    return jnp.sum(np.square(NORMS) * jnp.exp(-log_p), -1) / uniform


def learned(p_min: float, horizon: int, seed: jax.Array) -> jax.Array:
    """The logarithm of the distribution after each step."""
    layers = {f"{i:02}": jnp.float32(norm) for i, norm in enumerate(NORMS)}
    labels = {name: name for name in layers}
    tx = jointspar.jointspar(
        optax.identity(), Exchange(), labels, BUDGET, p_min=p_min, horizon=horizon
    )

    def step(state: Any, _: None) -> tuple[Any, jax.Array]:
        _, state = tx.update(layers, state, layers)  # gradients of these norms
        return state, jnp.stack([state.log_p[name] for name in layers])

    start = tx.init(layers)._replace(seed=seed)
    return jax.lax.scan(step, start, length=horizon)[1]


def bandit_table(machine: str, seed: int) -> Table:
    rows = []
    seeds = RUNS * seed + jnp.arange(RUNS, dtype=jnp.int32)
    for horizon in (500, 5000):
        for share in (0.025, 0.1, 0.25, 0.5, 0.75):
            p_min = share * BUDGET / LAYERS
            log_p = jax.vmap(functools.partial(learned, p_min, horizon))(seeds)
            ends = np.asarray(log_p[:, -1])
            alike = [np.corrcoef(np.log(NORMS), end)[0, 1] for end in ends]
            rows.append(
                {
                    "p_min D / s": f"{share:g}",
                    "T": str(horizon),
                    "in the end": f"{variance(log_p[:, -1]).mean():.2f}",
                    "over the run": f"{variance(log_p).mean():.2f}",
                    "correlation of log p": f"{np.mean(alike):.2f}",
                }
            )
    return table(
        f"Variance of the estimator over that of uniform draws: D {LAYERS}, "
        f"s {BUDGET:g}, norms from 1 to 10; the best possible 0.69",
        rows,
        f"mean of {RUNS} runs, seed {seed}; {machine}",
    )
