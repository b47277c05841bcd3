"""What the distribution learns: the estimator's variance, beside uniform draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from examples.common.tables import table
from slamb_jax.jointspar.distribution import project_distribution, update_distribution

LAYERS, BUDGET, RUNS = 12, 6.0, 20
NORMS = np.geomspace(1, 10, LAYERS).astype(np.float32)


def variance(log_p: jax.Array) -> jax.Array:
    r""":math:`\sum_d \|g_d\|^2 / p_d`, over that of the uniform distribution."""
    uniform = np.sum(np.square(NORMS)) * LAYERS / BUDGET
    return jnp.sum(np.square(NORMS) * jnp.exp(-log_p), -1) / uniform


def learned(p_min: float, horizon: int, key: jax.Array) -> jax.Array:
    """The logarithm of the distribution after each step."""
    update = functools.partial(
        update_distribution, budget=BUDGET, p_min=p_min, horizon=horizon
    )

    def step(
        carry: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        log_p, max_norm = carry
        active = jax.random.uniform(key, (LAYERS,)) < jnp.exp(log_p)
        log_p, max_norm = update(log_p, jnp.asarray(NORMS), active, max_norm)
        return (log_p, max_norm), log_p

    start = jnp.log(jnp.full(LAYERS, BUDGET / LAYERS)), jnp.float32(0)
    return jax.lax.scan(step, start, jax.random.split(key, horizon))[1]


def bandit_table(machine: str, seed: int) -> Table:
    best = variance(project_distribution(jnp.log(NORMS), BUDGET, 1e-3))
    keys, rows = jax.random.split(jax.random.key(seed), RUNS), []
    for horizon in (500, 5000):
        for share in (0.025, 0.1, 0.25, 0.5, 0.75):
            p_min = share * BUDGET / LAYERS
            log_p = jax.vmap(functools.partial(learned, p_min, horizon))(keys)
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
        f"s {BUDGET:g}, norms from 1 to 10; the best possible {best:.2f}",
        rows,
        f"mean of {RUNS} runs, seed {seed}; {machine}",
    )
