"""Shared by the image programs: digits, augmentation, scores, steps in an epoch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from examples.common.inputs import Arrays, Augment, Example, Source
from examples.common.loop import Batch, Task, Variables
from examples.common.options import Options

Apply = Callable[..., tuple[jax.Array, Any]]
"""Of parameters, statistics, images and a key, None to evaluate: logits, statistics"""


def digits() -> tuple[Arrays, Arrays]:
    """Scikit-learn's 1,797 handwritten digits, 8 x 8 x 1; every fifth is held out.

    They come inside that package; the copy is of the test set of UCI's optical
    recognition of handwritten digits.
    """
    found = load_digits()
    images = (found.images[..., None] / 16.0 - 0.3).astype(np.float32)
    labels = found.target.astype(np.int32)
    held_out = np.arange(len(labels)) % 5 == 4
    train, test = (
        Arrays(image=images[part], label=labels[part]) for part in (~held_out, held_out)
    )
    return train, test


def blank(number: int, shape: tuple[int, ...]) -> Arrays:
    """Black images that take no memory: shapes to compile for."""
    image = np.broadcast_to(np.zeros((), np.float32), (number, *shape))
    return Arrays(image=image, label=np.zeros(number, np.int32))


def shifted(pixels: int, flip: bool) -> Augment:
    """Augmentation: a random crop of the padded image, and half of them mirrored."""

    def augment(example: Example, rng: np.random.Generator) -> Example:
        image = example["image"]
        height, width, _ = image.shape
        edge = ((pixels, pixels), (pixels, pixels), (0, 0))
        padded = np.pad(image, edge, constant_values=image.min())
        top, left = rng.integers(0, 2 * pixels + 1, 2)
        image = padded[top : top + height, left : left + width]
        if flip and rng.random() < 0.5:
            image = image[:, ::-1]
        return {**example, "image": image}

    return augment


def steps_per_epoch(source: Source, options: Options) -> float:
    """Steps of all workers together that see as many examples as there are."""
    batch = options.batch_size * options.accumulate_steps * options.workers
    return len(source) / batch


def cross_entropy(
    logits: jax.Array, labels: jax.Array, smoothing: float = 0.0
) -> jax.Array:
    """One per example."""
    logits = logits.astype(jnp.float32)
    if not smoothing:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    return optax.softmax_cross_entropy(logits, targets)


def task(
    init: Callable[[jax.Array], Variables],
    apply: Apply,
    sources: tuple[Source, Source],
    *,
    smoothing: float = 0.0,
    **rest: Any,
) -> Task:
    """Classification; ``rest`` are further fields of the :class:`Task`."""

    def correct(logits: jax.Array, batch: Batch) -> jax.Array:
        return (jnp.argmax(logits, -1) == batch["label"]).astype(jnp.float32)

    def loss(params: optax.Params, kept: Any, batch: Batch, key: jax.Array) -> Any:
        logits, kept = apply(params, kept, batch["image"], key)
        losses = cross_entropy(logits, batch["label"], smoothing)
        accuracy = 100 * jnp.mean(correct(logits, batch))
        return jnp.mean(losses), (kept, {"accuracy": accuracy})

    def evaluate(params: optax.Params, kept: Any, batch: Batch) -> dict[str, jax.Array]:
        logits, _ = apply(params, kept, batch["image"], None)
        losses, weight = cross_entropy(logits, batch["label"]), batch["weight"]
        return {
            "loss": jnp.sum(weight * losses),
            "accuracy": 100 * jnp.sum(weight * correct(logits, batch)),
            "weight": jnp.sum(weight),
        }

    train, held_out = sources
    return Task(init, loss, evaluate, train, held_out, **rest)
