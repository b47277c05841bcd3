"""The tasks: what is trained, on what data, and how the loss is evaluated."""

import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.byte_lm import data
from examples.byte_lm.model import Active, ByteLM, next_byte_loss
from examples.common.simulated import Task
from slamb_jax.jointspar import train_if

CONTEXT = 64  # bytes of a sequence
MASKED = 10  # of them, in a masked sequence: 16 %
MASK = 256  # the token that stands for a masked byte
EVALUATED = 256  # sequences


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
    def __call__(self, x: jax.Array, active: Active = None) -> jax.Array:
        conv0, conv1 = nn.Conv(16, (3, 3)), nn.Conv(32, (3, 3), strides=2)
        x = nn.relu(train_if(active, "Conv_0", conv0, below=())(x))
        x = nn.relu(train_if(active, "Conv_1", conv1, below=("Conv_0",))(x))
        below = "Conv_0", "Conv_1"
        x = x.reshape(len(x), -1)
        x = nn.relu(train_if(active, "Dense_0", nn.Dense(64), below=below)(x))
        return nn.Dense(10)(x)

    @staticmethod
    def layers(params: optax.Params) -> dict[str, str | None]:
        """Labels for JointSpar; the last layer is always trained."""
        return {name: None if name == "Dense_1" else name for name in params}


@functools.cache
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes: the Python standard library's source."""
    return data.load(data.standard_library(), CONTEXT)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses)


def byte_lm(layers: int = 2) -> Task:
    """Predicts the next byte, as examples/byte_lm does, with a smaller model."""
    model = ByteLM(layers=layers, width=64, heads=4, context=CONTEXT)
    text, held_out = texts()
    (sample,) = data.batches(held_out, EVALUATED, CONTEXT, 1, seed=1)
    first = jnp.zeros((1, CONTEXT), jnp.int32)
    return Task(
        init=lambda key: model.init(key, first)["params"],
        loss=functools.partial(next_byte_loss, model),
        batches=lambda size, steps, seed: data.batches(
            text, size, CONTEXT, steps, seed
        ),
        held_out=sample,
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

    def loss(params: optax.Params, batch: Any) -> jax.Array:
        tokens, places = jnp.asarray(batch["bytes"]), batch["places"]
        row = jnp.arange(len(places))[:, None]
        seen = tokens.at[row, places].set(MASK)
        logits = model.apply({"params": params}, seen)[row, places]
        return cross_entropy(logits, tokens[row, places])

    (sample,) = masked(held_out, EVALUATED, 1, seed=1)
    first = jnp.zeros((1, CONTEXT), jnp.int32)
    return Task(
        init=lambda key: model.init(key, first)["params"],
        loss=loss,
        batches=functools.partial(masked, text),
        held_out=sample,
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
    # Not the split and scale of examples.common.images: the recorded runs had these.
    kept = np.arange(len(labels)) % 5 != 0
    model = DigitNet()

    def batches(size: int, steps: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            chosen = rng.choice(np.flatnonzero(kept), size)
            yield {"images": images[chosen], "labels": labels[chosen]}

    def loss(params: optax.Params, batch: Any, active: Active = None) -> jax.Array:
        logits = model.apply({"params": params}, batch["images"], active)
        return cross_entropy(logits, batch["labels"])

    return Task(
        init=lambda key: model.init(key, images[:1])["params"],
        loss=loss,
        batches=batches,
        held_out={"images": images[~kept], "labels": labels[~kept]},
    )


TASKS = {"byte_lm": byte_lm, "masked_lm": masked_lm, "digits": digits}


@functools.cache
def task(name: str) -> Task:
    return TASKS[name]()
