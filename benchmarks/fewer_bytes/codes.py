"""What the codes of ``slamb_jax.Exchange(payload=...)`` stand for, as arithmetic.

A copy of the formulas, without bytes: an array is cut into groups of (planes, rows,
128), a block is a row of all planes of a group, and a scale is of a block.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Quantize = Callable[[jax.Array], jax.Array]
"""(groups, planes, rows, width) to what the codes of them stand for."""
SEED = 1  # of rounding at random


class Code(NamedTuple):
    planes: int
    bits: float  # of an element, without its scale
    quantize: Quantize

    def stands_for(self, x: jax.Array) -> jax.Array:
        """(n, elements) as others decode them."""
        n, size = x.shape
        rows, width = 8 if size >= 2**16 else 1, 128
        if size < 2**16:
            width = 32 if size < 2**11 else 64
        padded = jnp.pad(x, ((0, 0), (0, -size % (self.planes * rows * width))))
        groups = padded.reshape(-1, self.planes, rows, width)
        return self.quantize(groups).reshape(n, -1)[:, :size]

    @property
    def bits_with_scale(self) -> float:
        """Of an element of a large array."""
        return self.bits + 32 / (self.planes * 128)


def mean_of_sent(sizes: jax.Array, is_sent: jax.Array) -> jax.Array:
    """The mean magnitude of each block's elements that are sent."""
    weights = is_sent.astype(jnp.float32)
    count = jnp.sum(weights, (1, 3), keepdims=True)
    return jnp.sum(weights * sizes, (1, 3), keepdims=True) / jnp.maximum(count, 1.0)


def are_large(sizes: jax.Array, of: jax.Array) -> jax.Array:
    """Which of the sizes are at least the mean magnitude of the block ``of`` them."""
    # Slightly below the mean, so that of equal magnitudes all are large.
    return sizes >= (1 - 2**-16) * jnp.mean(of, (1, 3), keepdims=True)


def ternary(x: jax.Array) -> jax.Array:
    is_sent = are_large(jnp.abs(x), of=jnp.abs(x))
    return jnp.where(is_sent, jnp.sign(x), 0.0) * mean_of_sent(jnp.abs(x), is_sent)


def sign(x: jax.Array) -> jax.Array:
    return jnp.where(x >= 0, 1.0, -1.0) * mean_of_sent(jnp.abs(x), x != 0)


def largest_of(count: int) -> Quantize:
    def quantize(x: jax.Array) -> jax.Array:
        each = x.reshape(len(x), -1, count, *x.shape[2:])
        top = jnp.argmax(jnp.abs(each), 2, keepdims=True)
        is_top = jnp.arange(count).reshape(1, 1, count, 1, 1) == top
        is_sent = is_top.reshape(x.shape) & are_large(jnp.abs(x), of=jnp.abs(x))
        return jnp.where(is_sent, jnp.sign(x), 0.0) * mean_of_sent(jnp.abs(x), is_sent)

    return quantize


def uniform(levels: int) -> Quantize:
    def quantize(x: jax.Array) -> jax.Array:
        step = jnp.max(jnp.abs(x), (1, 3), keepdims=True) / levels
        drawn = jax.random.uniform(jax.random.key(SEED), x.shape)
        return step * jnp.floor(x / jnp.where(step > 0, step, 1.0) + drawn)

    return quantize


CODES = {
    "uniform4": Code(2, 4, uniform(7)),
    "ternary": Code(5, 8 / 5, ternary),
    "sign": Code(8, 1, sign),
    "largest_of_7": Code(14, 4 / 7, largest_of(7)),
    "largest_of_31": Code(31, 8 / 31, largest_of(31)),
    "largest_of_127": Code(127, 8 / 127, largest_of(127)),
}
"""By the payloads that name them."""
