"""Batches by grain: shuffled, split among the workers, resumable anywhere."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grain
import jax
import numpy as np

Example: TypeAlias = dict[str, np.ndarray]
Augment: TypeAlias = Callable[[Example, np.random.Generator], Example]
Source: TypeAlias = grain.sources.RandomAccessDataSource[Example]
THREADS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)


class Arrays:
    """Examples that are rows of arrays in memory."""

    def __init__(self, **arrays: np.ndarray) -> None:
        lengths = {name: len(x) for name, x in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"arrays must have one length, got {lengths}")
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> Example:
        return {name: x[index] for name, x in self.arrays.items()}


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
    examples = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    if augment is not None:
        examples = examples.random_map(augment)
    return _own_batches(examples, workers * batch_size)


def held_out(source: Source, size: int) -> Iterator[Example]:
    """Each example once, in batches of ``size`` over all processes.

    The last batch is padded; ``weight`` is 1 for an example and 0 for padding.
    """

    def weighted(index: int, example: Example) -> Example:
        return {**example, "weight": np.asarray(index < len(source), np.float32)}

    padded = grain.MapDataset.source(source).repeat()
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
