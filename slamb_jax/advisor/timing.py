"""Seconds that the update of an optimizer takes, measured on this machine."""

import dataclasses
import functools
import numbers
import statistics
import time
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
_ALONE: dict[str, Any] = dict.fromkeys((
    "axis_name", "local_axis_name", "payload", "sync_every", "average_payload",
    "param_specs",
))  # fmt: skip


def measure_optimizers(
    params: float | chex.ArrayTree, exchange: Exchange, mu_dtype: DTypeLike | None
) -> tuple[float, float]:
    """Seconds of ``optax.lamb`` and of :func:`slamb`, update and application.

    The two alternate, with donated buffers and nothing exchanged; medians. For a
    number, or more than 2**24 elements, up to 16 matrices of 1024 x 1024 with a bias
    each are timed instead, and the times scaled by the number of elements.
    """
    alone = dataclasses.replace(exchange, **_ALONE)
    is_number = isinstance(params, numbers.Real)
    shapes = [] if is_number else shards_of(params, exchange)
    elements = int(float(params)) if is_number else _size(shapes)
    if is_number or elements > _MOST:
        pair = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (1024,))]
        shapes = [pair] * (min(max(elements, 2**20), _MOST) // 2**20)
        alone = dataclasses.replace(alone, stacked=None)
    optimizers = [optax.lamb(1e-3), slamb(1e-3, alone, mu_dtype=mu_dtype)]
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        lamb_seconds, slamb_seconds = _medians(optimizers, shapes)
    factor = elements / _size(shapes)
    return lamb_seconds * factor, slamb_seconds * factor


def _size(shapes: chex.ArrayTree) -> int:
    return sum(x.size for x in jax.tree.leaves(shapes))


def _medians(
    optimizers: list[optax.GradientTransformation], shapes: chex.ArrayTree
) -> list[float]:
    """The median seconds of a step of each."""

    def wave(x: jax.ShapeDtypeStruct) -> jax.Array:
        angles = jnp.arange(x.size, dtype=jnp.float32)
        return jnp.sin(angles).reshape(x.shape).astype(x.dtype)

    def step(tx: optax.GradientTransformation, state: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    values = functools.partial(jax.tree.map, wave, shapes)
    steps = [jax.jit(functools.partial(step, x), donate_argnums=0) for x in optimizers]
    states = [(params, tx.init(params)) for tx in optimizers for params in [values()]]
    grads = values()
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(_WARM_UP + _ROUNDS):
        for i, run in enumerate(steps):
            start = time.perf_counter()
            states[i] = jax.block_until_ready(run(states[i], grads))
            times[i].append(time.perf_counter() - start)
    return [statistics.median(t[_WARM_UP:]) for t in times]
