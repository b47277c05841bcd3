"""DeMo: the fast components of the momentum, found by a cosine transform."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.rivals.exchange import Rival, Sends, gather, matrix_shape, scatter

SIDE = 64  # of a chunk, at most


class DemoState(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    delta: optax.Updates  # decoupled momentum, float32, as params


def demo(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    chosen: int = 32,
    decay: float = 0.999,
) -> Rival:
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

    def init(params: optax.Params) -> DemoState:
        zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
        return DemoState(jnp.zeros([], jnp.int32), zeros)

    def update(
        updates: optax.Updates, state: DemoState, params: Any = None
    ) -> tuple[optax.Updates, DemoState]:
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        rate = jnp.asarray(rate, jnp.float32)
        delta = jax.tree.map(
            lambda d, g: decay * d + rate * g.astype(jnp.float32), state.delta, updates
        )
        cs = jax.tree.map(transform, delta)
        places = jax.tree.map(
            lambda c: jax.lax.top_k(jnp.abs(c), min(chosen, c.shape[1]))[1], cs
        )
        values = jax.tree.map(lambda c, i: jnp.take_along_axis(c, i, 1), cs, places)
        delta = jax.tree.map(
            lambda d, v, i: d - inverse(v[None], i[None], d.shape),
            delta,
            values,
            places,
        )
        narrow = jax.tree.map(lambda i: i.astype(jnp.uint16), places)

        def step(g: jax.Array, v: jax.Array, i: jax.Array) -> jax.Array:
            mean = inverse(v / len(v), i.astype(jnp.int32), g.shape)
            return (-rate * jnp.sign(mean)).astype(g.dtype)

        alls = gather(values, axis_name), gather(narrow, axis_name)
        count = optax.safe_increment(state.count)
        return jax.tree.map(step, updates, *alls), DemoState(count, delta)

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        # float32 values, and their places in 16 bits (64 in the authors' program).
        k = 0
        for x in jax.tree.leaves(params):
            down, across, a, b = sides(x.shape)
            k += down * across * min(chosen, a * b)
        return [("all-gather", 4 * k), ("all-gather", 2 * k)]

    return Rival(optax.GradientTransformation(init, update), sends)


def sides(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Chunks down and across, and their sides."""
    rows, columns = matrix_shape(shape)
    a, b = (max(s for s in range(1, SIDE + 1) if n % s == 0) for n in (rows, columns))
    return rows // a, columns // b, a, b


def transform(x: jax.Array) -> jax.Array:
    """The coefficients of each chunk: (chunks, elements of a chunk)."""
    down, across, a, b = sides(x.shape)
    blocks = x.reshape(down, a, across, b).swapaxes(1, 2)
    return (cosines(a) @ blocks @ cosines(b).T).reshape(down * across, a * b)


def inverse(values: jax.Array, places: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array that n workers' coefficients (n, chunks, chosen) add up to."""
    down, across, a, b = sides(shape)
    blocks = scatter(values, places, a * b).reshape(down, across, a, b)
    return (cosines(a).T @ blocks @ cosines(b)).swapaxes(1, 2).reshape(shape)


def cosines(size: int) -> jax.Array:
    """The orthonormal DCT-II as a matrix."""
    k, i = np.mgrid[:size, :size]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))
    matrix[0] /= np.sqrt(2)
    return jnp.asarray(matrix, jnp.float32)
