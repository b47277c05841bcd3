"""A small decoder-only transformer over bytes."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import slamb_jax

Active = Mapping[str, jax.Array] | None  # the blocks to train; None for all


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        causal = nn.make_causal_mask(x[..., 0])
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(h, mask=causal)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(h)))


class ByteLM(nn.Module):
    """Predicts the next byte; input and output embeddings are one."""

    layers: int
    width: int
    heads: int
    context: int

    @nn.compact
    def __call__(self, tokens: jax.Array, active: Active = None) -> jax.Array:
        embed = nn.Embed(256, self.width)
        place = self.param(
            "place", nn.initializers.normal(0.02), (self.context, self.width)
        )
        x = embed(tokens) + place[None, : tokens.shape[1]]
        for i in range(self.layers):
            block = Block(self.heads, name=f"Block_{i}")
            x = slamb_jax.train_if(active, f"Block_{i}", block)(x)
        return embed.attend(nn.LayerNorm()(x))


def blocks(params: optax.Params) -> dict[str, str | None]:
    """Labels for JointSpar: a block is a layer; the rest is always trained."""
    return {name: name if name.startswith("Block") else None for name in params}


def next_byte_loss(
    model: ByteLM, params: optax.Params, text: jax.Array, active: Active = None
) -> jax.Array:
    """Mean cross-entropy, in nats per byte, over sequences (batch, context + 1)."""
    logits = model.apply({"params": params}, text[:, :-1], active)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), text[:, 1:]
        )
    )
