"""Batches by grain: shuffled, split among the workers, resumable anywhere."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grain
import jax
import numpy as np
from sklearn.datasets import load_digits

Example: TypeAlias = dict[str, np.ndarray]
Augment: TypeAlias = Callable[[Example, np.random.Generator], Example]
Source: TypeAlias = grain.MapDataset[Example]
THREADS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)


def examples_of(**arrays: np.ndarray) -> Source:
    """Examples that are rows of arrays in memory."""
    (length,) = {len(x) for x in arrays.values()}  # one for all
    rows = grain.MapDataset.range(length)
    return rows.map(lambda i: {name: x[i] for name, x in arrays.items()})


def digits() -> tuple[Source, Source]:
    """Scikit-learn's 1,797 handwritten digits, 8 x 8 x 1; every fifth is held out.

    They come inside that package; the copy is of the test set of UCI's optical
    recognition of handwritten digits.
    """
    found = load_digits()
    images = (found.images[..., None] / 16.0 - 0.3).astype(np.float32)
    labels = found.target.astype(np.int32)
    held_out = np.arange(len(labels)) % 5 == 4
    train, test = (
        examples_of(image=images[part], label=labels[part])
        for part in (~held_out, held_out)
    )
    return train, test


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


def training(
    source: Source,
    batch_size: int,
    workers: int,
    seed: int,
    augment: Augment | None = None,
) -> grain.DatasetIterator:
    """An endless stream of batches for all workers of this process.

    Batch t of all workers together is the same for any number of processes. Every
    epoch has an order of its own, and a batch may span two; ``augment`` draws anew at
    every visit. ``get_state`` and ``set_state`` are the position.
    """
    if len(source) < 1:
        raise SystemExit("there are no examples to train on")
    examples = source.seed(seed).shuffle().repeat()
    if augment is not None:
        examples = examples.random_map(augment)
    return _own_batches(examples, workers * batch_size)


def held_out(source: Source, size: int) -> Iterator[Example]:
    """Each example once, in batches of ``size`` over all processes.

    The last batch is padded; ``weight`` is 1 for an example and 0 for padding.
    """

    def weighted(index: int, example: Example) -> Example:
        return {**example, "weight": np.asarray(index < len(source), np.float32)}

    padded = source.repeat()
    full = -(-len(source) // size) * size
    return _own_batches(padded[:full].map_with_index(weighted), size)


def _own_batches(examples: grain.MapDataset, size: int) -> grain.DatasetIterator:
    """This process's parts of batches of ``size``."""
    if size % jax.process_count():
        raise ValueError(f"size must split over processes, got {size}")
    batches = examples.batch(size // jax.process_count())
    own = batches[jax.process_index() :: jax.process_count()]
    return iter(own.to_iter_dataset(THREADS))


def position(stream: grain.DatasetIterator, workers: int) -> dict[str, Any]:
    """Where a stream stands, as JSON holds it: the same on all processes."""
    return {**stream.get_state(), "workers": workers}


def resume(
    stream: grain.DatasetIterator, position: dict[str, Any], workers: int
) -> None:
    """Goes on at a position, of another number of workers at the next full batch."""
    batches = position["next_index"] * position.get("workers", workers)
    stream.set_state({"next_index": -(-batches // workers)})
