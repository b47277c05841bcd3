"""What the distribution learns: its variance, beside that of uniform draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import slamb_jax

LAYERS, BUDGET = 12, 6.0
RUNS = 20


def norms() -> jax.Array:
    """Fixed ones, the largest ten times the smallest."""
    return jnp.asarray(np.geomspace(1, 10, LAYERS), jnp.float32)


def variance(log_p: jax.Array) -> jax.Array:
    r""":math:`\\sum_d \\|g_d\\|^2 / p_d`, over that of the uniform distribution."""
    uniform = jnp.sum(jnp.square(norms())) * LAYERS / BUDGET
    return jnp.sum(jnp.square(norms()) * jnp.exp(-log_p), -1) / uniform


def learned(p_min: float, horizon: int, key: jax.Array) -> jax.Array:
    """The distribution after each step, in logarithms."""
    update = functools.partial(
        slamb_jax.update_distribution, budget=BUDGET, p_min=p_min, horizon=horizon
    )

    def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        log_p, max_norm = carry
        active = jax.random.uniform(key, (LAYERS,)) < jnp.exp(log_p)
        log_p, max_norm = update(log_p, norms(), active, max_norm)
        return (log_p, max_norm), log_p

    start = jnp.log(jnp.full(LAYERS, BUDGET / LAYERS)), jnp.float32(0)
    return jax.lax.scan(step, start, jax.random.split(key, horizon))[1]


def bandit_table(machine: str, seed: int) -> Table:
    best = slamb_jax.project_distribution(jnp.log(norms()), BUDGET, 1e-3)
    out = Table(
        title=f"Variance of the estimator over that of uniform draws: D {LAYERS}, "
        f"s {BUDGET:g}, norms from 1 to 10; the best possible {variance(best):.2f}",
        caption=f"mean of {RUNS} runs, seed {seed}; {machine}",
    )
    heads = "p_min D / s", "T", "in the end", "over the run", "correlation of log p"
    for head in heads:
        out.add_column(head, justify="right")
    for horizon in (500, 5000):
        for share in (0.025, 0.1, 0.25, 0.5, 0.75):
            p_min = share * BUDGET / LAYERS
            run = functools.partial(learned, p_min, horizon)
            log_p = jax.vmap(run)(jax.random.split(jax.random.key(seed), RUNS))
            ends = np.asarray(log_p[:, -1])
            alike = [np.corrcoef(np.log(norms()), end)[0, 1] for end in ends]
            out.add_row(
                f"{share:g}",
                f"{horizon}",
                f"{jnp.mean(variance(log_p[:, -1])):.2f}",
                f"{jnp.mean(variance(log_p)):.2f}",
                f"{np.mean(alike):.2f}",
            )
    return out
