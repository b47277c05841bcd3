"""Tasks that no setting of an exchange was chosen on: other models, text, schedules."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from examples.byte_lm import data, model
from examples.common.simulated import Task

CONTEXT = 64  # bytes of a sequence
EVALUATED = 256  # sequences
MASK = 0  # a byte that no source file has
MASKED = 0.15  # share of the bytes


class GruLM(nn.Module):
    """Predicts the next byte with a recurrent network."""

    width: int
    context: int

    @nn.compact
    def __call__(self, tokens: jax.Array, active: Any = None) -> jax.Array:
        x = nn.Embed(256, self.width)(tokens)
        x = nn.RNN(nn.GRUCell(self.width))(x)
        return nn.Dense(256)(nn.LayerNorm()(x))


class Encoder(nn.Module):
    """Predicts masked bytes from those on both sides."""

    layers: int
    width: int
    heads: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.1)  # five times the usual
        place = self.param("place", init, (CONTEXT, self.width))
        x = nn.Embed(256, self.width, embedding_init=init)(tokens) + place
        for _ in range(self.layers):
            attention = nn.MultiHeadDotProductAttention(self.heads)
            x = nn.LayerNorm()(x + attention(x))  # norms after the sum, as in BERT
            hidden = nn.gelu(nn.Dense(4 * self.width)(x))
            x = nn.LayerNorm()(x + nn.Dense(self.width)(hidden))
        return nn.Dense(256)(x)


class Autoencoder(nn.Module):
    """Digits through sixteen numbers and back."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (256, 64, 16, 64, 256):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(64)(x)


def prose() -> Task:
    """A deep and narrow decoder on the text of Python's reference manual."""
    (topics,) = (f for f in data.standard_library() if f.name == "topics.py")
    net = model.ByteLM(layers=6, width=32, heads=4, context=CONTEXT)
    return model.task(net, *data.load([topics], CONTEXT), EVALUATED)


def wide() -> Task:
    """One wide layer on short sequences."""
    text, held_out = data.load(data.standard_library(), 32)
    net = model.ByteLM(layers=1, width=160, heads=5, context=32)
    return model.task(net, text, held_out, EVALUATED)


def gru() -> Task:
    """A recurrent network on the frontier's own text."""
    net: Any = GruLM(width=96, context=CONTEXT)
    text = data.load(data.standard_library(), CONTEXT)
    return model.task(net, *text, EVALUATED)


def masked() -> Task:
    """A small BERT: the loss is of the masked bytes alone."""
    net = Encoder(layers=3, width=64, heads=4)
    text, held_out = data.load(data.standard_library(), CONTEXT - 1)

    def hide(sequences: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        hidden = rng.random(sequences.shape) < MASKED
        seen = np.where(hidden, MASK, sequences)
        return {"seen": seen, "hidden": hidden, "bytes": sequences}

    def batches(size: int, steps: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for sequences in data.batches(text, size, CONTEXT - 1, steps, seed):
            yield hide(sequences, rng)

    def loss(params: optax.Params, batch: Any) -> jax.Array:
        logits = net.apply({"params": params}, batch["seen"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["bytes"])
        return jnp.mean(losses * batch["hidden"]) / MASKED

    (sample,) = data.batches(held_out, EVALUATED, CONTEXT - 1, 1, seed=1)
    first = jnp.zeros((1, CONTEXT), jnp.int32)
    return Task(
        init=lambda key: net.init(key, first)["params"],
        loss=loss,
        batches=batches,
        held_out=hide(sample, np.random.default_rng(1)),
        unit="nats per masked byte",
    )


def digits_batches(examples: Any) -> tuple[Any, Any]:
    """Batches drawn from four digits in five, and the others, which are held out."""
    count = len(jax.tree.leaves(examples)[0])
    kept = np.arange(count) % 5 != 0

    def batches(size: int, steps: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = rng.choice(np.flatnonzero(kept), size)
            yield jax.tree.map(lambda x, i=chosen: x[i], examples)

    return batches, jax.tree.map(lambda x: x[~kept], examples)


def autoencoder() -> Task:
    """Cross-entropy of the pixels of digits; one image in five is held out."""
    images = load_digits().data.astype(np.float32) / 16
    batches, held_out = digits_batches(images)
    net = Autoencoder()

    def loss(params: optax.Params, batch: jax.Array) -> jax.Array:
        logits = net.apply({"params": params}, batch)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch))

    return Task(
        init=lambda key: net.init(key, images[:1])["params"],
        loss=loss,
        batches=batches,
        held_out=held_out,
        unit="nats per pixel",
    )
