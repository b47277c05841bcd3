"""What a selection is, and what the random ones share."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax

from slamb_jax._checks import check_integer, check_range
from slamb_jax._leaves import Leaf


@runtime_checkable
class Selection(Protocol):
    """What a selection must offer; any object with these four methods serves.

    ``step`` is the int32 scalar ``t``, counted from 1, and may be traced. A leaf is
    seen as rows of neighbours, ``x.reshape(-1, width)``, which travel together. The
    answers must be the same on every worker.
    """

    def whole(self, leaf: Leaf) -> bool:
        """Whether the leaf is exchanged whole, every step (static)."""

    def width(self, leaf: Leaf) -> int:
        """Neighbours in a row (static): a divisor of the leaf's last dimension."""

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The rows that travel: int32 of static length, each once.

        A slot that is not needed holds the number of rows, one beyond the last.
        """

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Steps since each row was exchanged: int32 of shape (number of rows, 1).

        0 for the rows that travel at this step, ``step`` for those that never did.
        """


def is_selection(x: object) -> bool:
    """Whether ``x`` is an object with the protocol's methods, not a class of them."""
    return not isinstance(x, type) and isinstance(x, Selection)


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
        small = len(leaf.layer_shape) <= 1 or leaf.layer_size < self.min_size
        return small or leaf.size == 0 or self.compress_ratio == 1.0

    def width(self, leaf: Leaf) -> int:
        """Each element by itself."""
        del leaf
        return 1
