"""Another selection from a step on: compression that is warmed up."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from slamb_jax import _axes
from slamb_jax._checks import check_integer
from slamb_jax._leaves import Leaf
from slamb_jax._selections._selection import Selection, is_selection
from slamb_jax._selections._top_k import TopK


@dataclasses.dataclass(frozen=True)
class Piecewise:
    r"""One selection after the other, each from its step on.

    With ``{0: A, 500: B}`` the steps :math:`t = 1 \ldots 500` send what A says, and
    those after it what B says; the keys count steps from 0, as an optax schedule does.
    The age of a coordinate is that of the recurrence across the change: where B has
    not sent it since step 500, the steps since A did.

    One program holds all phases: the exchange of each is a branch of its own, and no
    change recompiles. ``slamb(compress_ratio={0: 0.5, 500: 0.1})`` makes one of these.

    Args:
      phases: a mapping from the step at which a selection begins to the selection;
        one of them begins at 0.

    Raises:
      ValueError: if no phase begins at 0, or for a step that is negative or not an
        integer, or a value that is not a selection.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import Leaf, Piecewise, Strided
      >>> half, quarter = (Strided(compress_ratio=k, min_size=0) for k in (0.5, 0.25))
      >>> leaf = Leaf(index=0, offset=0, shape=(2, 12), total=24)
      >>> warmed_up = Piecewise({0: half, 10: quarter})
      >>> [int((warmed_up.age(jnp.int32(t), leaf) == 0).sum()) for t in (9, 10, 11)]
      [12, 12, 6]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023:
      compression warm-up.
    """

    phases: Mapping[int, Selection]

    def __post_init__(self) -> None:
        if not isinstance(self.phases, Mapping) or 0 not in self.phases:
            raise ValueError(
                "phases must be a mapping from steps, one of them 0, to selections, "
                f"got {self.phases!r}"
            )
        for start, selection in self.phases.items():
            check_integer("phases (a step)", start, 0)
            if not is_selection(selection):
                raise ValueError(
                    "phases must have for values objects with the methods of "
                    f"slamb_jax.Selection, got {selection!r} at {start}"
                )
            if isinstance(selection, TopK):
                raise ValueError(
                    "phases cannot have a TopK, whose choice has a state that another "
                    f"phase would not keep, got {selection!r} at {start}"
                )
        object.__setattr__(self, "phases", dict(sorted(self.phases.items())))

    def __hash__(self) -> int:
        return hash(tuple(self.phases.items()))

    def at(self, step: jax.Array, fun: Callable[[Selection], Any]) -> Any:
        """``fun`` of the phase's selection, a branch of the program for each."""
        index = sum((step > s).astype(jnp.int32) for s in list(self.phases)[1:])
        branches = [functools.partial(fun, x) for x in self.phases.values()]
        return _axes.switch(jnp.asarray(index, jnp.int32), branches)

    def whole(self, leaf: Leaf) -> bool:
        return all(x.whole(leaf) for x in self.phases.values())

    def width(self, leaf: Leaf) -> int:
        parts = [x for x in self.phases.values() if not x.whole(leaf)]
        return math.gcd(*(x.width(leaf) for x in parts))

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        count = leaf.size // self.width(leaf)

        def finer(selection: Selection) -> jax.Array:
            if selection.whole(leaf):
                return jnp.arange(count, dtype=jnp.int32)
            factor = selection.width(leaf) // self.width(leaf)
            row = selection.rows(step, leaf)[:, None] * jnp.int32(factor)
            within = jnp.arange(factor, dtype=jnp.int32)[None]
            return jnp.minimum(row + within, jnp.int32(count)).reshape(-1)

        choices = [functools.partial(finer, x) for x in self.phases.values()]
        slots = max(jax.eval_shape(x).size for x in choices)

        def padded(selection: Selection) -> jax.Array:
            row = finer(selection)
            return jnp.pad(row, (0, slots - len(row)), constant_values=count)

        return self.at(step, padded)

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        starts = list(self.phases)
        age = jnp.zeros((leaf.size // self.width(leaf), 1), jnp.int32)
        for i, (start, selection) in enumerate(self.phases.items()):
            # As it was when the phase ended; now, in the one that has not.
            end = lax.min(step, jnp.int32(starts[i + 1])) if starts[i + 1 :] else step
            since = end - start
            own = jnp.zeros_like(age)
            if not selection.whole(leaf):
                factor = selection.width(leaf) // self.width(leaf)
                own = jnp.repeat(selection.age(end, leaf), factor, axis=0)
            own = jnp.where(own < since, own, age + since)
            age = jnp.where(since > 0, own, age)
        return age

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which rows travel: bool, of the shape of the age."""
        return self.age(step, leaf) == 0


def by_phase(
    selection: Selection, step: jax.Array, fun: Callable[[Selection], Any]
) -> Any:
    """``fun`` of the selection that holds at ``step``, in a branch if there are many.

    Shapes that depend on how much is sent have no other way.
    """
    if isinstance(selection, Piecewise):
        return selection.at(step, fun)
    return fun(selection)
