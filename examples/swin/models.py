"""Swin Transformer (Liu et al., 2021): attention in windows that shift."""

import functools
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Array = TypeVar("Array", jax.Array, np.ndarray)
INIT = nn.initializers.truncated_normal(0.02)


def cut(x: Array, window: int) -> Array:
    """(batch, height, width, channels) as (batch, windows, tokens, channels)."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // window, window, w // window, window, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, window**2, c)


def join(x: jax.Array, window: int, height: int, width: int) -> jax.Array:
    """Undoes :func:`cut`."""
    b, _, _, c = x.shape
    x = x.reshape(b, height // window, width // window, window, window, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, height, width, c)


def places(window: int) -> np.ndarray:
    """The row of the bias table for each pair of a window's tokens."""
    at = np.stack(np.meshgrid(*[np.arange(window)] * 2, indexing="ij")).reshape(2, -1)
    apart = at[:, :, None] - at[:, None, :] + window - 1
    row: np.ndarray = apart[0] * (2 * window - 1) + apart[1]
    return row


def neighbours(height: int, width: int, window: int, shift: int) -> np.ndarray:
    """Which tokens of a window were neighbours before the image was rolled."""
    region = np.zeros((1, height, width, 1), np.int32)
    thirds = slice(0, -window), slice(-window, -shift), slice(-shift, None)
    for i, rows in enumerate(thirds):
        for j, columns in enumerate(thirds):
            region[:, rows, columns] = 3 * i + j
    of = cut(region, window)[0, :, :, 0]
    same: np.ndarray = of[:, :, None] == of[:, None, :]
    return same


class WindowAttention(nn.Module):
    """Among the tokens of each window, with a bias by relative position."""

    heads: int
    window: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, mask: np.ndarray | None) -> jax.Array:
        channels = x.shape[-1]
        each = (self.heads, channels // self.heads)

        project = functools.partial(nn.DenseGeneral, dtype=self.dtype, kernel_init=INIT)
        names = "query", "key", "value"
        query, key, value = (project(each, name=name)(x) for name in names)
        table = self.param(
            "relative_position_bias", INIT, ((2 * self.window - 1) ** 2, self.heads)
        )
        bias = table[places(self.window)].transpose(2, 0, 1)[None, None]
        masks = None if mask is None else mask[None, :, None]
        mixed = nn.dot_product_attention(
            query, key, value, bias, masks, force_fp32_for_softmax=True
        )
        return project(channels, axis=(-2, -1), name="out")(mixed)


class Block(nn.Module):
    """Attention in windows, then an MLP; each may be left out for an image."""

    heads: int
    window: int
    shift: int
    drop_path: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        _, height, width, channels = x.shape

        def maybe(y: jax.Array) -> jax.Array:
            return nn.Dropout(
                self.drop_path, broadcast_dims=(1, 2, 3), deterministic=not train
            )(y)

        y, mask = nn.LayerNorm(dtype=self.dtype)(x), None
        if self.shift:
            y = jnp.roll(y, (-self.shift, -self.shift), (1, 2))
            mask = neighbours(height, width, self.window, self.shift)
        y = cut(y, self.window)
        y = WindowAttention(self.heads, self.window, self.dtype)(y, mask)
        y = join(y, self.window, height, width)
        x = x + maybe(jnp.roll(y, (self.shift, self.shift), (1, 2)))
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.Dense(4 * channels, dtype=self.dtype, kernel_init=INIT)(y)
        y = nn.Dense(channels, dtype=self.dtype, kernel_init=INIT)(nn.gelu(y))
        return x + maybe(y)


class Merge(nn.Module):
    """Two by two tokens become one of twice the channels."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        x = x.reshape(b, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 4, 2, 5)
        x = nn.LayerNorm(dtype=self.dtype)(x.reshape(b, h // 2, w // 2, 4 * c))
        return nn.Dense(2 * c, use_bias=False, dtype=self.dtype, kernel_init=INIT)(x)


class Swin(nn.Module):
    """Stages of blocks, every other one shifted by half a window."""

    classes: int
    patch: int
    window: int
    width: int
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    drop_path: float
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        self._check(*x.shape[1:3])
        step = (self.patch, self.patch)
        x = nn.Conv(self.width, step, step, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        rates = iter(np.linspace(0, self.drop_path, sum(self.depths)))
        for stage, (depth, heads) in enumerate(
            zip(self.depths, self.heads, strict=True)
        ):
            if stage:
                x = Merge(self.dtype)(x)
            window = min(self.window, x.shape[1])
            for i in range(depth):
                shift = window // 2 if i % 2 and window < x.shape[1] else 0
                block = Block(heads, window, shift, float(next(rates)), self.dtype)
                x = block(x, train)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean((1, 2))
        return nn.Dense(self.classes, kernel_init=INIT)(x.astype(jnp.float32))

    def _check(self, height: int, width: int) -> None:
        """Raises unless every stage's image is cut into whole windows."""
        if len(self.heads) != len(self.depths):
            raise ValueError(
                f"heads must be as many as depths, {self.depths}, got {self.heads}"
            )
        for stage in range(len(self.depths)):
            side, rest = divmod(height, self.patch * 2**stage)
            if height != width or rest or side % min(self.window, max(side, 1)):
                raise ValueError(
                    f"an image of {height} x {width} cannot be cut into windows of "
                    f"{self.window} tokens in stage {stage}, patches of {self.patch}"
                )
