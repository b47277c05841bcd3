"""DeMo: the fast components of the momentum, found by a cosine transform."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.rivals.exchange import Sends, gather, matrix_shape

SIDE = 64  # of a chunk, at most


class DemoState(NamedTuple):
    count: jax.Array
    delta: Any  # decoupled momentum, float32, as params


def demo(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    chosen: int = 32,
    decay: float = 0.999,
) -> optax.GradientTransformation:
    r"""Sign descent along the largest cosine components of local momenta.

    .. math::

      \delta &\leftarrow \beta \delta + lr\,g, \quad
      c = \text{the chosen largest of the DCT of each 64 x 64 chunk of } \delta \\
      \delta &\leftarrow \delta - \text{DCT}^{-1}(c), \quad
      p \leftarrow p - lr\,\text{sign}(\text{DCT}^{-1}(\text{mean over workers of } c))

    Leaves are seen as matrices; a chunk's side is the largest divisor of the
    dimension up to 64. (Peng, Quesnelle, Kingma, 2024,
    https://arxiv.org/abs/2411.19870.)
    """

    def init(params: Any) -> DemoState:
        zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
        return DemoState(jnp.zeros([], jnp.int32), zeros)

    def update(
        updates: Any, state: DemoState, params: Any = None
    ) -> tuple[Any, DemoState]:
        del params
        callable_rate = callable(learning_rate)
        rate = learning_rate(state.count) if callable_rate else learning_rate
        rate = jnp.asarray(rate, jnp.float32)
        gs, treedef = jax.tree.flatten(updates)
        deltas = [
            decay * d + rate * g.astype(jnp.float32)
            for d, g in zip(treedef.flatten_up_to(state.delta), gs, strict=True)
        ]
        coefficients = [transform(d) for d in deltas]
        places = [
            jax.lax.top_k(jnp.abs(c), min(chosen, c.shape[1]))[1] for c in coefficients
        ]
        values = [
            jnp.take_along_axis(c, i, 1)
            for c, i in zip(coefficients, places, strict=True)
        ]
        sent = [scatter(v[None], i[None], c.shape) for v, i, c in zip(
            values, places, coefficients, strict=True)]  # fmt: skip
        deltas = [d - inverse(s, d.shape) for d, s in zip(deltas, sent, strict=True)]
        means = _exchange(values, places, coefficients, axis_name)
        us = [
            (-rate * jnp.sign(inverse(m, g.shape))).astype(g.dtype)
            for m, g in zip(means, gs, strict=True)
        ]
        count = optax.safe_increment(state.count)
        return treedef.unflatten(us), DemoState(count, treedef.unflatten(deltas))

    return optax.GradientTransformation(init, update)


def _exchange(
    values: list[jax.Array],
    places: list[jax.Array],
    like: list[jax.Array],
    axis_name: str,
) -> list[jax.Array]:
    """Mean coefficients: two all-gathers, of values and of 16-bit places."""
    ends = [sum(v.size for v in values[: j + 1]) for j in range(len(values))]
    flat = jnp.concatenate([v.reshape(-1) for v in values])
    where = jnp.concatenate([i.reshape(-1).astype(jnp.uint16) for i in places])
    all_values = jnp.split(gather(flat, axis_name), ends, 1)
    all_places = jnp.split(gather(where, axis_name), ends, 1)
    out = []
    for v, i, mine, c in zip(all_values, all_places, values, like, strict=False):
        shape = (len(v), *mine.shape)
        total = scatter(v.reshape(shape), i.reshape(shape).astype(jnp.int32), c.shape)
        out.append(total / len(v))
    return out


def scatter(values: jax.Array, places: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums of the values (n, chunks, chosen) at their places in each chunk."""
    chunk = jnp.arange(shape[0], dtype=jnp.int32)[None, :, None]
    flat = (chunk * shape[1] + places).reshape(-1)
    return jnp.zeros(math.prod(shape)).at[flat].add(values.reshape(-1)).reshape(shape)


def sides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Chunks down and across, and their sides."""
    rows, columns = matrix_shape(shape)
    a, b = (max(s for s in range(1, SIDE + 1) if n % s == 0) for n in (rows, columns))
    return rows // a, columns // b, a, b


def transform(x: jax.Array) -> jax.Array:
    """The coefficients of each chunk: (chunks, elements of a chunk)."""
    down, across, a, b = sides(x.shape)
    blocks = x.reshape(down, a, across, b).swapaxes(1, 2)
    out = cosines(a) @ blocks @ cosines(b).T
    return out.reshape(down * across, a * b)


def inverse(coefficients: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array of that shape which has these coefficients."""
    down, across, a, b = sides(shape)
    blocks = cosines(a).T @ coefficients.reshape(down, across, a, b) @ cosines(b)
    return blocks.swapaxes(1, 2).reshape(shape)


def cosines(size: int) -> jax.Array:
    """The orthonormal DCT-II as a matrix."""
    k, i = np.mgrid[:size, :size]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))
    matrix[0] /= np.sqrt(2)
    return jnp.asarray(matrix, jnp.float32)


def demo_sends(params: Any, workers: int, step: int, chosen: int = 32) -> Sends:
    """All-gathers of float32 values and of their places in 16 bits (which take 64 in
    the authors' program)."""
    del workers, step
    k = 0
    for x in jax.tree.leaves(params):
        down, across, a, b = sides(x.shape)
        k += down * across * min(chosen, a * b)
    return [("all-gather", 4 * k), ("all-gather", 2 * k)]
