"""A step that may be skipped: each state is chosen where it is computed."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from slamb_jax._leaves import map_present


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["flag"], meta_fields=[]
)
@dataclasses.dataclass
class Skip:
    """Whether to skip a step: the extra argument ``skip`` of the links' ``update``.

    A link chooses between its old and its new state as soon as it has computed it, so
    that the new one takes the old one's memory: a choice behind all links would keep
    both until then, and here it finds that it was made.
    """

    flag: jax.Array  # bool, shape []
    _chosen: dict[int, tuple[Any, Any]] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def choose(self, old: chex.ArrayTree, new: chex.ArrayTree) -> chex.ArrayTree:
        """``old`` if the step is skipped, else ``new``; None where ``new`` has it."""

        def one(new: Any, old: Any) -> Any:
            if self._skipped(new) is self._skipped(old):
                return new
            out = jnp.where(self.flag, old, new)
            self.follow(old, out)
            return out

        return map_present(one, new, old)

    def instead(self, old: list[jax.Array], new: list[jax.Array]) -> list[jax.Array]:
        """:meth:`choose` for parts of a state, of which nothing is remembered."""
        pairs = zip(old, new, strict=True)
        return [jnp.where(self.flag, x, y) for x, y in pairs]

    def follow(self, old: chex.ArrayTree, new: chex.ArrayTree) -> None:
        """Tells that ``new`` is ``old`` if the step is skipped."""
        for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True):
            # With y, which keeps its name from another array.
            self._chosen[id(y)] = self._skipped(x), y

    def _skipped(self, x: Any) -> Any:
        """What ``x`` is known to be if the step is skipped."""
        return self._chosen.get(id(x), (x,))[0]


def unless(skip: Skip | None, old: chex.ArrayTree, new: chex.ArrayTree) -> Any:
    """``new``, or ``old`` if this step is skipped; None where ``new`` has it."""
    return new if skip is None else skip.choose(old, new)
