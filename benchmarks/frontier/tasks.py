"""The tasks: what is trained, on what, and how the loss is evaluated."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.byte_lm import data
from examples.byte_lm.model import ByteLM, next_byte_loss

CONTEXT = 64  # bytes of a sequence
MASKED = 10  # of them, in a masked sequence: 16 %
MASK = 256  # the token that stands for a masked byte
EVALUATED = 256  # sequences


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and its data; min_size is SLAMB's, for this model."""

    init: Callable[[jax.Array], Any]
    loss: Callable[[Any, Any], jax.Array]
    batches: Callable[[int, int, int], Iterator[Any]]  # of size, steps, seed
    held_out: Any
    min_size: int
    unit: str


class MaskedLM(nn.Module):
    """A small encoder that guesses masked bytes from both sides."""

    layers: int = 2
    width: int = 64
    heads: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(MASK + 1, self.width)
        place = self.param("place", nn.initializers.normal(0.02), (CONTEXT, self.width))
        x = embed(tokens) + place[None]
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
            h = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(h)
        return embed.attend(nn.LayerNorm()(x))


class DigitNet(nn.Module):
    """Two convolutions and two dense layers over images of 8 x 8."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


@functools.cache
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes: the Python standard library's source."""
    return data.load(data.standard_library(), CONTEXT)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def byte_lm() -> Task:
    """Predicts the next byte, as examples/byte_lm does, with a smaller model."""
    model = ByteLM(layers=2, width=64, heads=4, context=CONTEXT)
    text, held_out = texts()

    def batches(size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
        return data.batches(text, size, CONTEXT, steps, seed)

    (sample,) = data.batches(held_out, EVALUATED, CONTEXT, 1, seed=1)
    first = jnp.zeros((1, CONTEXT), jnp.int32)
    return Task(
        init=lambda key: model.init(key, first)["params"],
        loss=lambda params, text: next_byte_loss(model, params, text),
        batches=batches,
        held_out=sample,
        min_size=1000,
        unit="nats per byte",
    )


def masked_lm() -> Task:
    """Guesses the masked 16 % of the bytes of a sequence."""
    model = MaskedLM()
    text, held_out = texts()

    def masked(text: np.ndarray, size: int, steps: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng([seed, 1])
        for tokens in data.batches(text, size, CONTEXT - 1, steps, seed):
            order = rng.random(tokens.shape).argsort(1)
            places = order[:, :MASKED].astype(np.int32)
            yield {"bytes": tokens, "places": places}

    def loss(params: Any, batch: Any) -> jax.Array:
        whole, places = jnp.asarray(batch["bytes"]), batch["places"]
        row = jnp.arange(len(places))[:, None]
        tokens = whole.at[row, places].set(MASK)
        logits = model.apply({"params": params}, tokens)[row, places]
        return cross_entropy(logits, whole[row, places])

    (sample,) = masked(held_out, EVALUATED, 1, seed=1)
    first = jnp.zeros((1, CONTEXT), jnp.int32)
    return Task(
        init=lambda key: model.init(key, first)["params"],
        loss=loss,
        batches=lambda size, steps, seed: masked(text, size, steps, seed),
        held_out=sample,
        min_size=1000,
        unit="nats per masked byte",
    )


def digits() -> Task:
    """Classifies scikit-learn's digits; one image in five is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(
            "the task digits needs scikit-learn: pip install 'slamb-jax[benchmarks]'"
        ) from error
    raw = load_digits()
    images = (raw.images[..., None] / 16).astype(np.float32)
    labels = raw.target.astype(np.int32)
    held_out = np.arange(len(labels)) % 5 == 0
    model = DigitNet()

    def some(chosen: np.ndarray) -> dict[str, np.ndarray]:
        return {"images": images[chosen], "labels": labels[chosen]}

    def batches(size: int, steps: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        kept = np.flatnonzero(~held_out)
        for _ in range(steps):
            yield some(rng.choice(kept, size))

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["images"])
        return cross_entropy(logits, batch["labels"])

    return Task(
        init=lambda key: model.init(key, images[:1])["params"],
        loss=loss,
        batches=batches,
        held_out=some(np.flatnonzero(held_out)),
        min_size=256,
        unit="nats",
    )


TASKS = {"byte_lm": byte_lm, "masked_lm": masked_lm, "digits": digits}


@functools.cache
def task(name: str) -> Task:
    return TASKS[name]()
