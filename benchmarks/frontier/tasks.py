"""The tasks: models, data and losses."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks.frontier import unseen
from benchmarks.frontier.fineweb import fineweb
from benchmarks.frontier.unseen import CONTEXT, EVALUATED
from examples.byte_lm import data, model
from examples.byte_lm.model import Active, ByteLM
from examples.common.simulated import Task
from slamb_jax.jointspar import train_if

APART = 8  # workers whose data differ
INSTALLED = 2**26  # bytes of source that are read at most


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


def byte_lm(layers: int = 2, width: int = 64, heads: int = 4) -> Task:
    """Predicts the next byte, as examples/byte_lm does."""
    net = ByteLM(layers=layers, width=width, heads=heads, context=CONTEXT)
    text, held_out = data.load(data.standard_library(), CONTEXT)
    return model.task(net, text, held_out, EVALUATED)


def byte_lm_bfloat16(layers: int, width: int, heads: int) -> Task:
    """The same in bfloat16, on the source of all that is installed: for GPUs."""
    net = ByteLM(layers, width, heads, CONTEXT, jnp.bfloat16)
    text, held_out = data.load(data.installed(INSTALLED), CONTEXT)
    print(f"{len(text):,} bytes of source to train on, {len(held_out):,} to evaluate")
    return model.task(net, text, held_out, EVALUATED)


def byte_lm_apart() -> Task:
    """The same where each of eight workers reads an eighth of the files, in order."""
    net = ByteLM(layers=2, width=64, heads=4, context=CONTEXT)
    text, held_out = data.load(data.standard_library(), CONTEXT)
    parts = np.array_split(text, APART)

    def batches(size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
        own = [
            data.batches(part, size // APART, CONTEXT, steps, APART * seed + i)
            for i, part in enumerate(parts)
        ]
        for rows in zip(*own, strict=True):
            yield np.concatenate(rows)

    task = model.task(net, text, held_out, EVALUATED)
    return dataclasses.replace(task, batches=batches)


def digits(classes: Collection[int] = range(10)) -> Task:
    """Classifies scikit-learn's digits; one image in five is held out."""
    raw = load_digits()
    chosen = np.isin(raw.target, list(classes))
    images = (raw.images[chosen, ..., None] / 16).astype(np.float32)
    labels = raw.target[chosen].astype(np.int32)
    # Not the split and scale of examples.common.images: the recorded runs had these.
    batches, held_out = unseen.digits_batches({"images": images, "labels": labels})
    net = DigitNet()

    def loss(params: optax.Params, batch: Any, active: Active = None) -> jax.Array:
        logits = net.apply({"params": params}, batch["images"], active)
        losses = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(losses(logits, batch["labels"]))

    return Task(
        init=lambda key: net.init(key, images[:1])["params"],
        loss=loss,
        batches=batches,
        held_out=held_out,
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
    "digits": digits,
    "prose": unseen.prose,
    "wide": unseen.wide,
    "gru": unseen.gru,
    "masked": unseen.masked,
    "autoencoder": unseen.autoencoder,
    "fineweb": fineweb,
}


@functools.cache
def task(name: str) -> Task:
    return TASKS[name]()


def schedule(name: str, steps: int) -> optax.Schedule | None:
    """The learning rate over its peak; None: warm-up, then a cosine."""
    if name == "wide":
        return optax.linear_schedule(1.0, 0.0, steps)
    if name == "fineweb":  # up, constant, and down over the last 0.7
        up, start = optax.linear_schedule(0.0, 1.0, steps // 20), 3 * steps // 10
        down = optax.linear_schedule(1.0, 0.0, steps - start)
        return optax.join_schedules([up, down], [start])
    if name == "autoencoder":
        return optax.linear_schedule(0.0, 1.0, steps // 10)  # and constant from there
    return None
