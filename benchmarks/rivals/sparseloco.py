"""SparseLoCo: DiLoCo whose parameter change is cut to its largest and quantized."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from benchmarks.rivals.exchange import Rival, Sends, elements, scatter

CHUNK = 4096  # places in a chunk take 12 bits


class SparseLocoState(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    inner: optax.OptState  # AdamW's; it stays local
    anchor: optax.Params  # where all workers last agreed
    residual: jax.Array  # e, flat


def sparseloco(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    sync_every: int,
    chosen: int = 64,
    decay: float = 0.95,
    outer_rate: float = 1.0,
    b2: float = 0.999,
) -> Rival:
    r"""H local steps of AdamW, then one of SGD on their compressed mean.

    At steps H, 2H, ... with a the parameters after the outer step before, and C the
    ``chosen`` largest of each 4096 in 2 bits each:

    .. math::

      x &= \gamma e + (a - p), \quad e \leftarrow x - C(x) \\
      a &\leftarrow a - \eta\,\text{mean over workers of } C(x), \quad p \leftarrow a

    (Sarfi et al., 2025, https://arxiv.org/abs/2508.15706.) The two bits here are the
    sign, and which of two magnitudes: the means of those above and below the middle.
    """

    inner = optax.adamw(learning_rate, b2=b2, weight_decay=0.0)

    def init(params: optax.Params) -> SparseLocoState:
        return SparseLocoState(
            jnp.zeros([], jnp.int32),
            inner.init(params),
            jax.tree.map(jnp.array, params),
            jnp.zeros(elements(params)),
        )

    def outer(updates: Any, params: Any, anchor: Any, residual: jax.Array) -> Any:
        there = optax.apply_updates(params, updates)
        change, unravel = ravel_pytree(jax.tree.map(jnp.subtract, anchor, there))
        x = decay * residual + change
        words, scales = compress(x, chosen)
        all_words = jax.lax.all_gather(words, axis_name)
        all_scales = jax.lax.all_gather(scales, axis_name)
        step = unravel(sum_of(all_words, all_scales, x.size) / len(all_words))
        anchor = jax.tree.map(lambda a, s: a - outer_rate * s, anchor, step)
        residual = x - sum_of(words[None], scales[None], x.size)
        return jax.tree.map(jnp.subtract, anchor, params), anchor, residual

    def local(updates: Any, params: Any, anchor: Any, residual: jax.Array) -> Any:
        del params
        return updates, anchor, residual

    def update(
        updates: optax.Updates, state: SparseLocoState, params: optax.Params
    ) -> tuple[optax.Updates, SparseLocoState]:
        updates, inner_state = inner.update(updates, state.inner, params)
        count = optax.safe_increment(state.count)
        operands = updates, params, state.anchor, state.residual
        due = count % sync_every == 0
        updates, *kept = jax.lax.cond(due, outer, local, *operands)
        return updates, SparseLocoState(count, inner_state, *kept)

    def agreed(step: int) -> bool:
        return step % sync_every == 0

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        # 16 bits for each chosen (12 of place, 2 of value, 2 unused), and two float32
        # magnitudes a chunk.
        chunks = -(-elements(params) // CHUNK)
        each = [("all-gather", 2 * chunks * chosen), ("all-gather", 8 * chunks)]
        return each if agreed(step) else []

    return Rival(optax.GradientTransformation(init, update), sends, agreed=agreed)


def compress(x: jax.Array, chosen: int) -> tuple[jax.Array, jax.Array]:
    """The largest of each chunk: words (chunks, chosen), magnitudes (chunks, 2).

    A uint16 word has the place in its low 12 bits, then the sign, then which of the
    two magnitudes.
    """
    chunks = jnp.pad(x, (0, -x.size % CHUNK)).reshape(-1, CHUNK)
    size, place = jax.lax.top_k(jnp.abs(chunks), chosen)
    above = size > (size[:, :1] + size[:, -1:]) / 2
    scales = [
        jnp.sum(jnp.where(part, size, 0.0), 1)
        / jnp.maximum(jnp.sum(part.astype(jnp.float32), 1), 1.0)
        for part in (~above, above)
    ]
    negative = jnp.take_along_axis(chunks, place, 1) < 0
    word = place + (negative.astype(jnp.int32) << 12) + (above.astype(jnp.int32) << 13)
    return word.astype(jnp.uint16), jnp.stack(scales, 1)


def sum_of(words: jax.Array, scales: jax.Array, size: int) -> jax.Array:
    """The sum of the compressed changes of n workers: (n, chunks, ...) to a vector."""
    word = words.astype(jnp.int32)
    value = jnp.take_along_axis(scales, (word >> 13) & 1, -1)
    value = jnp.where((word >> 12) & 1 == 1, -value, value)
    return scatter(value, word & (CHUNK - 1), CHUNK).reshape(-1)[:size]
