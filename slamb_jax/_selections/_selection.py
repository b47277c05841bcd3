"""What a selection is, and what the random ones share."""

import abc
import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax

from slamb_jax._checks import check_integer, check_range
from slamb_jax._leaves import Leaf


@runtime_checkable
class Selection(Protocol):
    """What a selection must offer; any object with these five methods serves.

    ``step`` is the int32 scalar ``t``, counted from 1, and may be traced. ``x`` has
    the leaf's shape. A leaf is seen as rows of neighbours, ``x.reshape(rows, -1)``,
    which travel together: mask and age have the shape ``(rows, 1)``, with rows equal
    to the leaf's size where each element goes by itself. The answers must be the same
    on every worker.
    """

    def whole(self, leaf: Leaf) -> bool:
        """Whether the leaf is exchanged whole, every step (static)."""

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which rows are exchanged at ``step``: bool, shape (rows, 1)."""

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Steps since the last exchange: int32, 0 on the mask, ``step`` if never."""

    def pack(self, step: jax.Array, leaf: Leaf, x: jax.Array) -> jax.Array:
        """The chosen elements of ``x`` in an array of static shape, 0 where unused."""

    def unpack(
        self, step: jax.Array, leaf: Leaf, packed: jax.Array, x: jax.Array
    ) -> jax.Array:
        """``x`` with its chosen elements replaced by those in ``packed``."""


class ByRows(abc.ABC):
    """Packs by copying the chosen rows: a selection need only say which they are."""

    def _width(self, leaf: Leaf) -> int:
        """Neighbours that travel together."""
        return 1

    @abc.abstractmethod
    def _chosen(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The rows that travel: int32, of static length; beyond the last if unused."""

    def pack(self, step: jax.Array, leaf: Leaf, x: jax.Array) -> jax.Array:
        width, x = self._width(leaf), jnp.atleast_1d(x)
        rows = lax.GatherDimensionNumbers(
            offset_dims=(1,),
            collapsed_slice_dims=tuple(range(x.ndim - 1)),
            start_index_map=tuple(range(x.ndim)),
        )
        starts = _starts(self._chosen(step, leaf), width, x.shape)
        sizes = (1,) * (x.ndim - 1) + (width,)
        return lax.gather(x, starts, rows, sizes, mode="fill", fill_value=0)

    def unpack(
        self, step: jax.Array, leaf: Leaf, packed: jax.Array, x: jax.Array
    ) -> jax.Array:
        width, shape, x = self._width(leaf), x.shape, jnp.atleast_1d(x)
        rows = lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=tuple(range(x.ndim - 1)),
            scatter_dims_to_operand_dims=tuple(range(x.ndim)),
        )
        starts = _starts(self._chosen(step, leaf), width, x.shape)
        # Only indices beyond the last repeat, and those are dropped.
        x = lax.scatter(x, starts, packed, rows, mode="drop", unique_indices=True)
        return x.reshape(shape)


def _starts(row: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    """Where rows begin, as coordinates in ``shape``: int32, shape (rows, ndim).

    In the leaf's own shape, because XLA updates no reshaped array in place. A row
    beyond the last begins beyond the first dimension.
    """
    grid = (*shape[:-1], shape[-1] // width)
    places = []
    for size in reversed(grid[1:]):
        places.append(lax.rem(row, jnp.int32(size)))
        row = lax.div(row, jnp.int32(size))
    places = [row, *reversed(places)]
    places[-1] = places[-1] * width
    return jnp.stack(places, -1)


@dataclasses.dataclass(frozen=True)
class RandK(ByRows):
    """The settings that the random selections share."""

    compress_ratio: float = 0.1
    min_size: int = 9000
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("compress_ratio", self.compress_ratio, 0.0, 1.0, open_low=True)
        check_integer("min_size", self.min_size, 0)
        check_integer("seed", self.seed)

    def whole(self, leaf: Leaf) -> bool:
        """Leaves of one dimension or fewer, small ones, and all when k is 1."""
        small = len(leaf.shape) <= 1 or leaf.size < self.min_size
        return small or leaf.size == 0 or self.compress_ratio == 1.0
