"""The tasks: models, data, losses, and what else is measured of them."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

from examples.byte_lm import data, model
from examples.byte_lm.model import Active, ByteLM
from examples.common import simulated
from slamb_jax.jointspar import train_if

APART = 8  # workers whose files differ
CONTEXT = 64  # bytes of a sequence
EVALUATED = 256  # sequences
FOLDS = 5
INSTALLED = 2**26  # bytes of source that are read at most
MASK = 0  # a byte that no source file has
MASKED = 0.15  # share of the bytes
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


@dataclasses.dataclass(frozen=True)
class Task(simulated.Task):
    """A model and its data, and how many test images it tells right."""

    accuracy: Callable[[optax.Params], jax.Array] | None = None
    """of parameters, in per cent"""
    schedule: Callable[[int], optax.Schedule | None] = lambda steps: None
    """of so many steps the rate over its peak; None: warm-up, then a cosine"""
    of_seed: Callable[[int], "Task"] | None = None
    """the task of a seed, where the seed says what is tested on"""


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


class MLP(nn.Module):
    """64-128-128-10."""

    @nn.compact
    def __call__(self, x: jax.Array, active: Active = None) -> jax.Array:
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


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


def bytes_of(net: Any, files: Any = None, schedule: Any = None) -> Task:
    """Predicts the next byte of files, or of the standard library's source."""
    text, held_out = data.load(files or data.standard_library(), net.context)
    made = model.task(net, text, held_out, EVALUATED)
    return Task(**vars(made), schedule=schedule or (lambda steps: None))


def byte_lm(layers: int = 2, width: int = 64, heads: int = 4) -> Task:
    """As examples/byte_lm does."""
    return bytes_of(ByteLM(layers, width, heads, CONTEXT))


def byte_lm_bfloat16(layers: int, width: int, heads: int) -> Task:
    """The same in bfloat16, on the source of all that is installed: for GPUs."""
    net = ByteLM(layers, width, heads, CONTEXT, jnp.bfloat16)
    return bytes_of(net, data.installed(INSTALLED))


def byte_lm_apart() -> Task:
    """The same where each of eight workers reads an eighth of the files, in order."""
    text, _ = data.load(data.standard_library(), CONTEXT)
    parts = np.array_split(text, APART)

    def batches(size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
        own = [
            data.batches(part, size // APART, CONTEXT, steps, APART * seed + i)
            for i, part in enumerate(parts)
        ]
        for rows in zip(*own, strict=True):
            yield np.concatenate(rows)

    return dataclasses.replace(byte_lm(), batches=batches)


def prose() -> Task:
    """A deep and narrow decoder on the text of Python's reference manual."""
    topics = [f for f in data.standard_library() if f.name == "topics.py"]
    return bytes_of(ByteLM(layers=6, width=32, heads=4, context=CONTEXT), topics)


def wide() -> Task:
    """One wide layer on short sequences."""
    net = ByteLM(layers=1, width=160, heads=5, context=32)
    return bytes_of(net, None, lambda steps: optax.linear_schedule(1.0, 0.0, steps))


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
        each = cross_entropy(logits, batch["bytes"])
        return jnp.mean(each * batch["hidden"]) / MASKED

    (sample,) = data.batches(held_out, EVALUATED, CONTEXT - 1, 1, seed=1)
    return Task(
        init=lambda key: net.init(key, jnp.zeros((1, CONTEXT), jnp.int32))["params"],
        loss=loss,
        batches=batches,
        held_out=hide(sample, np.random.default_rng(1)),
        unit="nats per masked byte",
    )


def images(*, shuffled: bool = False) -> dict[str, np.ndarray]:
    """Scikit-learn's digits, of 8 x 8 x 1, and their labels."""
    raw, order = load_digits(), np.arange(1797)
    if shuffled:
        order = np.random.default_rng(0).permutation(order)
    pixels = (raw.images[order, ..., None] / 16).astype(np.float32)
    return {"images": pixels, "labels": raw.target[order].astype(np.int32)}


def drawn(examples: Any, pools: Sequence[np.ndarray]) -> Callable[..., Iterator[Any]]:
    """Batches of as many rows from each pool, one of all workers or one for each."""

    def batches(size: int, steps: int, seed: int) -> Iterator[Any]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            each = [rng.choice(pool, size // len(pools)) for pool in pools]
            yield chosen(examples, np.concatenate(each))

    return batches


def chosen(examples: Any, rows: np.ndarray) -> Any:
    return jax.tree.map(lambda x: x[rows], examples)


FIFTH = np.arange(1797) % 5 == 0  # one image in five is held out


def classes(net: Any, batches: Any, held_out: Any, tested: Any, **more: Any) -> Task:
    """Tells digits apart: the loss is of what is held out, or of others."""

    def logits(params: optax.Params, batch: Any, active: Active = None) -> jax.Array:
        found: jax.Array = net.apply({"params": params}, batch["images"], active)
        return found

    def loss(params: optax.Params, batch: Any, active: Active = None) -> jax.Array:
        return jnp.mean(cross_entropy(logits(params, batch, active), batch["labels"]))

    def accuracy(params: optax.Params) -> jax.Array:
        right = jnp.argmax(logits(params, tested), -1) == tested["labels"]
        return 100 * jnp.mean(right.astype(jnp.float32))

    return Task(
        init=lambda key: net.init(key, held_out["images"][:1])["params"],
        loss=loss,
        batches=batches,
        held_out=held_out,
        accuracy=accuracy,
        **more,
    )


def digits() -> Task:
    """One image in five is held out."""
    every = images()
    held_out = chosen(every, FIFTH)
    batches = drawn(every, [np.flatnonzero(~FIFTH)])
    return classes(DigitNet(), batches, held_out, held_out)


def digits_folds(seed: int = FOLDS) -> Task:
    """A seed says which of five folds is tested on; the sixth is of the rates."""
    every = images()

    def split(rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        of = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
        labels = every["labels"][rows]
        return [(rows[a], rows[b]) for a, b in of.split(labels, labels)]

    folds = split(np.arange(1797))
    train, test = [*folds, split(folds[0][0])[0]][seed]
    held_out = chosen(every, test)
    of_seed = functools.cache(digits_folds)
    batches = drawn(chosen(every, train), [np.arange(len(train))])
    return classes(DigitNet(), batches, held_out, held_out, of_seed=of_seed)


def digits_of_workers(*, apart: bool) -> Task:
    """Five workers that draw from all digits, or from two classes each.

    The loss is of what is trained on, the accuracy of what is held out.
    """
    every = images(shuffled=True)
    own = [every["labels"] // 2 == i if apart else True for i in range(5)]
    batches = drawn(every, [np.flatnonzero(~FIFTH & mask) for mask in own])
    trained, tested = chosen(every, ~FIFTH), chosen(every, FIFTH)

    def schedule(steps: int) -> optax.Schedule:
        return optax.cosine_decay_schedule(1.0, steps)

    return classes(MLP(), batches, trained, tested, schedule=schedule)


def autoencoder() -> Task:
    """Cross-entropy of the pixels of digits."""
    pixels = images()["images"].reshape(1797, 64)
    net = Autoencoder()

    def loss(params: optax.Params, batch: jax.Array) -> jax.Array:
        logits = net.apply({"params": params}, batch)
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch))

    return Task(
        init=lambda key: net.init(key, pixels[:1])["params"],
        loss=loss,
        batches=drawn(pixels, [np.flatnonzero(~FIFTH)]),
        held_out=pixels[FIFTH],
        unit="nats per pixel",
        schedule=lambda steps: optax.linear_schedule(0.0, 1.0, steps // 10),
    )


TASKS: dict[str, Callable[[], Task]] = {
    "byte_lm": byte_lm,
    "byte_lm_apart": byte_lm_apart,
    "byte_lm_23k": lambda: byte_lm(layers=1, width=32),
    "byte_lm_52k": lambda: byte_lm(layers=2, width=40),
    "byte_lm_427k": lambda: byte_lm(layers=3, width=104, heads=8),
    "byte_lm_1600k": lambda: byte_lm(layers=4, width=176, heads=8),
    "byte_lm_3m": lambda: byte_lm(layers=4, width=256, heads=8),
    "byte_lm_10m": lambda: byte_lm_bfloat16(layers=6, width=384, heads=6),
    "byte_lm_tiny": lambda: byte_lm_bfloat16(layers=1, width=32, heads=2),
    "prose": prose,
    "wide": wide,
    "gru": lambda: bytes_of(GruLM(width=96, context=CONTEXT)),
    "masked": masked,
    "digits": digits,
    "digits_folds": digits_folds,
    "digits_alike": lambda: digits_of_workers(apart=False),
    "digits_apart": lambda: digits_of_workers(apart=True),
    "autoencoder": autoencoder,
}


@functools.cache
def task(name: str) -> Task:
    return TASKS[name]()


@functools.cache
def parameters(name: str) -> int:
    """How many a task's model has."""
    shapes = jax.eval_shape(task(name).init, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(shapes))
