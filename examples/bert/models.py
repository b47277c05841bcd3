"""BERT's encoder and its masked-language head, as Devlin et al. (2018) made them.

Without segments and the next-sentence task, which one text in one piece has no use for.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

INIT = nn.initializers.normal(0.02)


class Layer(nn.Module):
    """Attention and MLP, each followed by a norm of the sum."""

    heads: int
    dropout: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        width = x.shape[-1]

        def joined(x: jax.Array, y: jax.Array) -> jax.Array:
            y = nn.Dropout(self.dropout, deterministic=not train)(y)
            return nn.LayerNorm(dtype=self.dtype)(x + y)

        attended = nn.MultiHeadDotProductAttention(
            self.heads,
            dtype=self.dtype,
            kernel_init=INIT,
            dropout_rate=self.dropout,
            deterministic=not train,
        )(x)
        x = joined(x, attended)
        y = nn.Dense(4 * width, dtype=self.dtype, kernel_init=INIT)(x)
        y = nn.Dense(width, dtype=self.dtype, kernel_init=INIT)(nn.gelu(y))
        return joined(x, y)


class Bert(nn.Module):
    """Logits over the vocabulary, at the positions asked for."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    length: int
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(
        self, tokens: jax.Array, positions: jax.Array, train: bool
    ) -> jax.Array:
        embed = nn.Embed(
            self.vocabulary, self.width, embedding_init=INIT, dtype=self.dtype
        )
        place = self.param("place", INIT, (self.length, self.width))
        x = embed(tokens) + place[None, : tokens.shape[1]].astype(self.dtype)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        layer = nn.remat(Layer, static_argnums=(2,)) if self.remat else Layer
        for i in range(self.layers):
            x = layer(self.heads, self.dropout, self.dtype, name=f"layer_{i}")(x, train)
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        x = nn.Dense(self.width, dtype=self.dtype, kernel_init=INIT)(x)
        x = nn.LayerNorm(dtype=self.dtype)(nn.gelu(x))
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
        return embed.attend(x).astype(jnp.float32) + bias
