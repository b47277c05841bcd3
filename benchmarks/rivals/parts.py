"""Parts of published methods that neither optax nor slamb_jax has."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax.compressors import Codec

CHUNK = 4096  # of SparseLoCo: places take 12 bits
SIDE = 64  # of a chunk of DeMo, at most


def own_adam(
    frozen: bool, eps: float, b2: float = 0.999
) -> optax.GradientTransformation:
    """Adam's direction of the momentum it gets; ``frozen``: its v stays as it is."""

    def update(m: Any, state: Any, params: Any = None) -> Any:
        count, v = state
        if not frozen:
            count, v = count + 1, optax.tree.update_moment(m, v, b2, 2)
        fix = jnp.sqrt(1 - b2**count)
        # What was not seen before v froze stays: a sign over eps is a giant step.
        u = jax.tree.map(
            lambda m, v: jnp.where(v > 0, m / (jnp.sqrt(v) / fix + eps), 0.0), m, v
        )
        return u, (count, v)

    return optax.GradientTransformation(
        lambda params: (jnp.float32(0), optax.tree.zeros_like(params)), update
    )


def masked_momentum(compressor: Any, decay: float) -> optax.GradientTransformation:
    """Momentum before a compressor; what is sent is forgotten, the velocity too."""

    def update(g: Any, state: Any, params: Any = None) -> Any:
        u, waits, inner = state
        u = jax.tree.map(lambda u, g: decay * u + g, u, g)
        sent, inner = compressor.update(optax.tree.add(u, waits), inner, params)
        u = jax.tree.map(lambda u, e: jnp.where(e == 0, 0.0, u), u, sent.unsent)
        return sent.mean, (u, sent.unsent, inner)

    def init(params: Any) -> Any:
        zeros = optax.tree.zeros_like(params)
        return zeros, zeros, compressor.init(params)

    return optax.GradientTransformation(init, update)


def terngrad() -> Codec:
    """Three values by stochastic rounding: 0 and the largest magnitude of each 640.

    So each element is right on average. Five digits share a byte, 3**5 being 243.
    """
    powers = 3 ** np.arange(5, dtype=np.uint8)

    def encode(x: jax.Array, common: jax.Array, own: jax.Array) -> Any:
        blocks = jnp.pad(x.reshape(-1), (0, -x.size % 640)).reshape(-1, 640)
        scale = jnp.max(jnp.abs(blocks), 1, keepdims=True)
        is_sent = jax.random.uniform(own, blocks.shape) * scale < jnp.abs(blocks)
        digits = jnp.where(is_sent, jnp.sign(blocks), 0.0) + 1
        digits = digits.astype(jnp.uint8).reshape(-1, 5) * powers.reshape(1, 5)
        return jnp.sum(digits, 1, dtype=jnp.uint8), scale

    def decode(code: Any, like: jax.ShapeDtypeStruct, common: jax.Array) -> jax.Array:
        packed, scale = code
        digits = packed.reshape(-1, 1) // powers.reshape(1, 5) % np.uint8(3)
        blocks = (digits.astype(jnp.float32) - 1).reshape(-1, 640) * scale
        return blocks.reshape(-1)[: like.size].reshape(like.shape)

    return Codec(encode, decode)


def two_bits(share: float) -> Codec:
    """Of each 4096 the largest, each as its sign and one of two magnitudes.

    A uint16 has the place in its low 12 bits, then the sign, then which magnitude: the
    mean of those above the middle, or of the others.
    """

    def encode(x: jax.Array, common: jax.Array, own: jax.Array) -> Any:
        width = min(CHUNK, x.size)
        chunks = jnp.pad(x.reshape(-1), (0, -x.size % width)).reshape(-1, width)
        size, place = jax.lax.top_k(jnp.abs(chunks), max(1, round(share * width)))
        above = (size > (size[:, :1] + size[:, -1:]) / 2).astype(jnp.float32)
        scales = [
            jnp.sum(part * size, 1) / jnp.maximum(jnp.sum(part, 1), 1.0)
            for part in (1 - above, above)
        ]
        negative = jnp.take_along_axis(chunks, place, 1) < 0
        bits = negative.astype(jnp.int32) + 2 * above.astype(jnp.int32)
        return (place + CHUNK * bits).astype(jnp.uint16), jnp.stack(scales, 1)

    def decode(code: Any, like: jax.ShapeDtypeStruct, common: jax.Array) -> jax.Array:
        word, scales = code[0].astype(jnp.int32), code[1]
        bits, width = word // CHUNK, min(CHUNK, like.size)
        value = jnp.take_along_axis(scales, bits // 2, 1) * (1 - 2 * (bits % 2))
        whole = scattered(value, word % CHUNK, width).reshape(-1)
        return whole[: like.size].reshape(like.shape)

    return Codec(encode, decode)


def cosines(count: int) -> Codec:
    """The largest components of the cosine transform of each chunk of a matrix."""

    def encode(x: jax.Array, common: jax.Array, own: jax.Array) -> Any:
        down, a, across, b = chunks_of(x.shape)
        blocks = x.reshape(down, a, across, b).swapaxes(1, 2)
        c = (dct(a) @ blocks @ dct(b).T).reshape(down * across, a * b)
        _, place = jax.lax.top_k(jnp.abs(c), min(count, a * b))
        return jnp.take_along_axis(c, place, 1), place.astype(jnp.uint16)

    def decode(code: Any, like: jax.ShapeDtypeStruct, common: jax.Array) -> jax.Array:
        down, a, across, b = chunks_of(like.shape)
        c = scattered(code[0], code[1].astype(jnp.int32), a * b)
        blocks = dct(a).T @ c.reshape(down, across, a, b) @ dct(b)
        return blocks.swapaxes(1, 2).reshape(like.shape)

    return Codec(encode, decode)


def dct(size: int) -> jax.Array:
    """The orthonormal DCT-II as a matrix."""
    k, i = np.mgrid[:size, :size]
    matrix = np.sqrt(2 / size) * np.cos(np.pi * (2 * i + 1) * k / (2 * size))
    matrix[0] /= np.sqrt(2)
    return jnp.asarray(matrix, jnp.float32)


def scattered(values: jax.Array, places: jax.Array, width: int) -> jax.Array:
    """Rows of so many, 0 but for the values at their places."""
    zeros = jnp.zeros((len(values), width))
    return jnp.put_along_axis(zeros, places, values, 1, inplace=False)


def chunks_of(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Of a leaf as a matrix: chunks down, rows of each, chunks across, columns."""
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    both = min(cuts, key=sum, default=(1, math.prod(shape)))
    a, b = (max(s for s in range(1, SIDE + 1) if n % s == 0) for n in both)
    return both[0] // a, a, both[1] // b, b
