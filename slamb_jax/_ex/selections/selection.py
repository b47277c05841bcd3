"""The interface of a selection, and the settings that the random ones share."""

import abc
import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from slamb_jax._checks import check_integer, check_range
from slamb_jax._leaves import Leaf

T = TypeVar("T")


class Selection(abc.ABC):
    r"""Which coordinates are exchanged at a step.

    A leaf is seen as blocks of neighbours, ``x.reshape(-1, block_size)``. At the step
    :math:`t = 1, 2, \ldots`, an int32 scalar that may be traced, the selection answers
    for one :class:`Leaf` which blocks are exchanged, :math:`M_t`, and the age
    :math:`\tau` of each block. The answers must be the same on every worker; no mask is
    ever communicated. Subclass it for a selection of your own: two methods are enough.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> class EveryOther(slamb_jax.selections.Selection):
      ...     def blocks(self, step, leaf):
      ...         return 2 * jnp.arange(leaf.size // 2) + step % 2
      ...     def age(self, step, leaf):
      ...         return jnp.minimum(step, (jnp.arange(leaf.size) + step) % 2)[:, None]
      >>> exchange = slamb_jax.Exchange("data", selection=EveryOther())
    """

    def dense(self, leaf: Leaf) -> bool:
        """Whether all of the leaf is exchanged at every step (static)."""
        return len(leaf.layer_shape) <= 1

    def block_size(self, leaf: Leaf) -> int:
        """Neighbours in a block (static): a divisor of the leaf's last dimension."""
        del leaf
        return 1

    @abc.abstractmethod
    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The blocks that are exchanged: int32 of static length, each once.

        An unused slot holds the number of blocks, one beyond the last.
        """

    @abc.abstractmethod
    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Steps since each block was exchanged: int32 of shape (blocks, 1).

        0 for the blocks of this step, ``step`` for those that never were.
        """

    def at(self, step: jax.Array, fun: Callable[["Selection"], T]) -> T:
        """``fun`` of the selection in force at ``step``.

        Where there are several, each gets its own branch of the program: what is
        exchanged has another shape in each.
        """
        del step
        return fun(self)


@dataclasses.dataclass(frozen=True)
class RandK(Selection):
    """The settings that the random selections share."""

    compress_ratio: float = 0.1
    min_size: int = 9000
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("compress_ratio", self.compress_ratio, 0.0, 1.0, open_low=True)
        check_integer("min_size", self.min_size, 0)
        check_integer("seed", self.seed)

    def dense(self, leaf: Leaf) -> bool:
        """Leaves of one dimension or fewer, small ones, and all when k is 1."""
        small = len(leaf.layer_shape) <= 1 or leaf.layer_size < self.min_size
        return small or leaf.size == 0 or self.compress_ratio == 1.0


def elements_sent(selection: Selection, leaf: Leaf) -> int:
    """Elements of the leaf that are exchanged per step, unused slots included."""
    if selection.dense(leaf):
        return leaf.size

    def blocks(step: jax.Array) -> jax.Array:
        return selection.blocks(step, leaf)

    slots = jax.eval_shape(blocks, jax.ShapeDtypeStruct((), jnp.int32)).size
    return slots * selection.block_size(leaf)
