"""What a selection is, and what the random ones share."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax

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
        """The chosen elements of ``x``, in an array of static shape."""

    def unpack(
        self, step: jax.Array, leaf: Leaf, packed: jax.Array, x: jax.Array
    ) -> jax.Array:
        """``x`` with its chosen elements replaced by those in ``packed``."""


@dataclasses.dataclass(frozen=True)
class RandK:
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


def gather(x: jax.Array, width: int, chosen: jax.Array) -> jax.Array:
    """The chosen rows of ``width`` neighbours; 0 for an index beyond the last."""
    return x.reshape(-1, width).at[chosen].get(mode="fill", fill_value=0)


def scatter(x: jax.Array, chosen: jax.Array, packed: jax.Array) -> jax.Array:
    """``x`` with the chosen rows replaced; an index beyond the last is dropped."""
    rows = x.reshape(-1, packed.shape[1])
    # Indices beyond the last repeat, but those are dropped.
    rows = rows.at[chosen].set(packed, mode="drop", unique_indices=True)
    return rows.reshape(x.shape)
