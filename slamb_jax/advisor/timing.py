"""Seconds that the update of an optimizer takes, measured on this machine."""

import dataclasses
import numbers
import time
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from slamb_jax.advisor.parameters import shards_of
from slamb_jax.exchange.settings import Exchange
from slamb_jax.optimizers import slamb

_MOST = 2**24  # elements of the largest tree that is timed itself
_WARM_UP, _ROUNDS = 2, 7


def measure_optimizers(
    params: float | chex.ArrayTree, exchange: Exchange, mu_dtype: DTypeLike | None
) -> tuple[float, float]:
    """Seconds of ``optax.lamb`` and of :func:`slamb`, update and application.

    The two alternate, with donated buffers and nothing exchanged; medians. For a
    number, or more than 2**24 elements, up to 16 matrices of 1024 x 1024 with a bias
    each are timed instead, and the times scaled by the number of elements.
    """
    alone = dataclasses.replace(
        exchange,
        axis_name=None,
        local_axis_name=None,
        payload=None,
        sync_every=None,
        average_payload=None,
        param_specs=None,
    )
    if isinstance(params, numbers.Real):
        shapes, elements = None, int(float(params))
    else:
        shapes = shards_of(params, exchange)
        elements = _size(shapes)
    if shapes is None or elements > _MOST:
        shapes = _stand_in(elements)
        alone = dataclasses.replace(alone, stacked=None)
    factor = elements / _size(shapes)
    optimizers = [optax.lamb(1e-3), slamb(1e-3, alone, mu_dtype=mu_dtype)]
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        lamb_seconds, slamb_seconds = _medians(optimizers, shapes)
    return lamb_seconds * factor, slamb_seconds * factor


def _size(shapes: chex.ArrayTree) -> int:
    return sum(x.size for x in jax.tree.leaves(shapes))


def _stand_in(elements: int) -> chex.ArrayTree:
    pairs = min(max(elements, 2**20), _MOST) // 2**20
    pair = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (1024,))]
    return [pair] * pairs


def _medians(
    optimizers: list[optax.GradientTransformation], shapes: chex.ArrayTree
) -> list[float]:
    """The median seconds of a step of each."""

    def values() -> chex.ArrayTree:
        def wave(x: jax.ShapeDtypeStruct) -> jax.Array:
            angles = jnp.arange(x.size, dtype=jnp.float32)
            return jnp.sin(angles).reshape(x.shape).astype(x.dtype)

        return jax.tree.map(wave, shapes)

    def program(tx: optax.GradientTransformation) -> Callable[..., Any]:
        def step(
            state: tuple[chex.ArrayTree, optax.OptState], grads: chex.ArrayTree
        ) -> tuple[chex.ArrayTree, optax.OptState]:
            params, opt_state = state
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return jax.jit(step, donate_argnums=0)

    steps = [program(tx) for tx in optimizers]
    states = [(params, tx.init(params)) for tx in optimizers for params in [values()]]
    grads = values()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_WARM_UP + _ROUNDS):
        for i, step in enumerate(steps):
            start = time.perf_counter()
            states[i] = jax.block_until_ready(step(states[i], grads))
            times[i].append(time.perf_counter() - start)
    return [sorted(t[_WARM_UP:])[_ROUNDS // 2] for t in times]
