"""Another selection from a step on: warm-up of the compression."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from slamb_jax import _axes
from slamb_jax._checks import check_integer
from slamb_jax._ex.selections.selection import Selection, T
from slamb_jax._leaves import Leaf


@dataclasses.dataclass(frozen=True)
class Schedule(Selection):
    r"""One selection after the other, each from its step on.

    With ``{0: A, 500: B}`` A selects at the steps :math:`t = 1 \ldots 500` and B
    afterwards; the keys count steps from 0, as an optax schedule does. Ages are those
    of the recurrence across the change: where B has not exchanged a coordinate since
    step 500, the steps since A did.

    One program holds all phases, each in a branch of its own: no change recompiles.
    ``Exchange(compress_ratio={0: 0.5, 500: 0.1})`` makes one of these.

    Args:
      phases: a mapping from the step at which a selection begins to the selection;
        one of them begins at 0.

    Raises:
      ValueError: if no phase begins at 0, for a step that is not an integer of at
        least 0, and for a value that is not a selection.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax.selections import Leaf, Schedule, Strided
      >>> half, quarter = (Strided(compress_ratio=k, min_size=0) for k in (0.5, 0.25))
      >>> leaf, warm_up = Leaf(0, (2, 12)), Schedule({0: half, 10: quarter})
      >>> [int((warm_up.age(jnp.int32(t), leaf) == 0).sum()) for t in (9, 10, 11)]
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
            if not isinstance(selection, Selection):
                raise ValueError(
                    f"phases must have selections for values, got {selection!r} at "
                    f"{start}"
                )
        object.__setattr__(self, "phases", dict(sorted(self.phases.items())))

    def __hash__(self) -> int:
        return hash(tuple(self.phases.items()))

    def dense(self, leaf: Leaf) -> bool:
        return all(x.dense(leaf) for x in self.phases.values())

    def block_size(self, leaf: Leaf) -> int:
        sparse = [x for x in self.phases.values() if not x.dense(leaf)]
        return math.gcd(*(x.block_size(leaf) for x in sparse))

    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        raise ValueError(
            f"selection={self!r} exchanges another number of blocks in each phase: ask "
            "the phase, with at(step, lambda phase: ...)"
        )

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        starts = list(self.phases)
        age = jnp.zeros((leaf.size // self.block_size(leaf), 1), jnp.int32)
        for i, (start, selection) in enumerate(self.phases.items()):
            # The age at the end of the phase, or now in the one in force.
            end = lax.min(step, jnp.int32(starts[i + 1])) if starts[i + 1 :] else step
            since = end - start
            own = jnp.zeros_like(age)
            if not selection.dense(leaf):
                factor = selection.block_size(leaf) // self.block_size(leaf)
                own = jnp.repeat(selection.age(end, leaf), factor, axis=0)
            own = jnp.where(own < since, own, age + since)
            age = jnp.where(since > 0, own, age)
        return age

    def at(self, step: jax.Array, fun: Callable[[Selection], T]) -> T:
        index = sum((step > s).astype(jnp.int32) for s in list(self.phases)[1:])
        branches = [functools.partial(fun, x) for x in self.phases.values()]
        return _axes.switch(jnp.asarray(index, jnp.int32), branches)
