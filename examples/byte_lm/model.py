"""A small decoder-only transformer over bytes, and the task of training it."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.byte_lm import data
from examples.common.simulated import Task
from slamb_jax import jointspar

Active = Mapping[str, jax.Array] | None  # the blocks to train; None for all


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    heads: int
    dtype: jax.typing.DTypeLike | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, dtype = x.shape[-1], self.dtype
        causal = nn.make_causal_mask(x[..., 0])
        h = nn.LayerNorm(dtype=dtype)(x)
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=dtype)
        x = x + attention(h, mask=causal)
        h = nn.LayerNorm(dtype=dtype)(x)
        # In this order: Flax numbers them so, and draws their parameters by the number.
        out, wide = nn.Dense(width, dtype=dtype), nn.Dense(4 * width, dtype=dtype)
        return x + out(nn.gelu(wide(h)))


class ByteLM(nn.Module):
    """Predicts the next byte; input and output embeddings are one.

    ``dtype`` is that of activations and matrix products; None: the parameters'.
    """

    layers: int
    width: int
    heads: int
    context: int
    dtype: jax.typing.DTypeLike | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array, active: Active = None) -> jax.Array:
        embed = nn.Embed(256, self.width, dtype=self.dtype)
        place = self.param(
            "place", nn.initializers.normal(0.02), (self.context, self.width)
        )
        x = embed(tokens)
        x = x + place[None, : tokens.shape[1]].astype(x.dtype)
        for i in range(self.layers):
            block = Block(self.heads, self.dtype, name=f"Block_{i}")
            x = jointspar.train_if(active, f"Block_{i}", block)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def blocks(params: optax.Params) -> dict[str, str | None]:
    """Labels for JointSpar: a block is a layer; the rest is always trained."""
    return {name: name if name.startswith("Block") else None for name in params}


def next_byte_loss(
    model: ByteLM, params: optax.Params, text: jax.Array, active: Active = None
) -> jax.Array:
    """Mean cross-entropy, in nats per byte, over sequences (batch, context + 1)."""
    logits: Any = model.apply({"params": params}, text[:, :-1], active)
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), text[:, 1:]
        )
    )


def task(
    model: ByteLM, text: np.ndarray, held_out: np.ndarray, eval_batch: int
) -> Task:
    """Trains ``model`` on ``text``; evaluates it on a fixed sample of ``held_out``."""

    def batches(size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
        return data.batches(text, size, model.context, steps, seed)

    (sample,) = data.batches(held_out, eval_batch, model.context, 1, seed=1)
    first = jnp.zeros((1, model.context), jnp.int32)
    return Task(
        init=lambda key: model.init(key, first)["params"],
        loss=functools.partial(next_byte_loss, model),
        batches=batches,
        held_out=sample,
        unit="nats per byte",
    )
