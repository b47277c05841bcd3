"""SparseLoCo: DiLoCo whose parameter change is cut to its largest and quantized."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import (
    Sends,
    elements,
    flatten,
    gather,
    unflatten,
)
from slamb_jax._axes import cond

CHUNK = 4096  # places in a chunk take 12 bits


class SparselocoState(NamedTuple):
    count: jax.Array
    inner: Any
    anchor: Any  # where all workers last agreed, as params
    residual: jax.Array  # what was not sent, float32, flat


def sparseloco(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    sync_every: int,
    chosen: int = 64,
    decay: float = 0.95,
    outer_rate: float = 1.0,
) -> optax.GradientTransformation:
    r"""H local steps of AdamW, then one of SGD on their compressed mean.

    At steps H, 2H, ... with a the parameters after the outer step before, and C the
    ``chosen`` largest of each 4096 in 2 bits each:

    .. math::

      x &= \gamma e + (a - p), \quad e \leftarrow x - C(x) \\
      a &\leftarrow a - \eta\,\text{mean over workers of } C(x), \quad p \leftarrow a

    (Sarfi et al., 2025, https://arxiv.org/abs/2508.15706.) The two bits here are the
    sign, and which of two magnitudes: the means of those above and below the middle.
    """
    inner = optax.adamw(learning_rate, weight_decay=0.0)

    def init(params: Any) -> SparselocoState:
        copy = jax.tree.map(jnp.array, params)
        zeros = jnp.zeros(elements(params))
        return SparselocoState(
            jnp.zeros([], jnp.int32), inner.init(params), copy, zeros
        )

    def update(
        updates: Any, state: SparselocoState, params: Any
    ) -> tuple[Any, SparselocoState]:
        updates, inner_state = inner.update(updates, state.inner, params)
        count = optax.safe_increment(state.count)

        def outer(updates: Any, params: Any, anchor: Any, residual: Any) -> tuple:
            there = optax.apply_updates(params, updates)
            change = flatten(jax.tree.map(lambda a, p: a - p, anchor, there))
            x = decay * residual + change
            words, scales = compress(x, chosen)
            residual = x - decompress(words, scales, x.size)
            alls = gather(words, axis_name), gather(scales, axis_name)
            step = sum_of(*alls, x.size) / len(alls[0])
            anchor = jax.tree.map(
                lambda a, s: a - outer_rate * s, anchor, unflatten(step, anchor)
            )
            return jax.tree.map(lambda a, p: a - p, anchor, params), anchor, residual

        def local(updates: Any, params: Any, anchor: Any, residual: Any) -> tuple:
            del params
            return updates, anchor, residual

        operands = (updates, params, state.anchor, state.residual)
        due = count % sync_every == 0
        updates, anchor, residual = cond(due, outer, local, *operands)
        return updates, SparselocoState(count, inner_state, anchor, residual)

    return optax.GradientTransformation(init, update)


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
    """The sum of what several workers sent, as one vector."""
    word = words.astype(jnp.int32)
    which = (word >> 13) & 1
    value = jnp.take_along_axis(scales, which, -1)
    value = jnp.where((word >> 12) & 1 == 1, -value, value)
    chunks = words.shape[-2]
    chunk = jnp.arange(chunks, dtype=jnp.int32)[None, :, None]
    place = (chunk * CHUNK + (word & (CHUNK - 1))).reshape(-1)
    total = jnp.zeros(chunks * CHUNK).at[place].add(value.reshape(-1))
    return total[:size]


def decompress(words: jax.Array, scales: jax.Array, size: int) -> jax.Array:
    """What one worker sent, as a vector."""
    return sum_of(words[None], scales[None], size)


def sparseloco_sends(
    params: Any, workers: int, step: int, sync_every: int, chosen: int = 64
) -> Sends:
    """Every H steps all-gathers of 16 bits for each chosen (12 of place, 2 of value, 2
    unused) and of two float32 magnitudes a chunk."""
    del workers
    chunks = -(-elements(params) // CHUNK)
    due = step % sync_every == 0
    return due * [("all-gather", 2 * chunks * chosen), ("all-gather", 8 * chunks)]
