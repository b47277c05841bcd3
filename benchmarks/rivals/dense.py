"""Any optax optimizer on gradients averaged over the workers: the baselines."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Sends, elements, mean, mean_sends


def averaged(
    optimizer: optax.GradientTransformation,
    axis_name: str,
    dtype: Any = jnp.float32,
) -> optax.GradientTransformation:
    """``optimizer`` on mean gradients, which travel in ``dtype``."""

    def exchange(grads: Any, _: Any) -> Any:
        sent = jax.tree.map(lambda g: g.astype(dtype), grads)
        means = mean(sent, axis_name)
        return jax.tree.map(lambda m, g: m.astype(g.dtype), means, grads)

    return optax.chain(optax.stateless(exchange), optimizer)


def averaged_sends(
    params: Any, workers: int, step: int, dtype: Any = jnp.float32
) -> Sends:
    """A mean of all gradients."""
    del step
    return mean_sends(elements(params), workers, dtype)
