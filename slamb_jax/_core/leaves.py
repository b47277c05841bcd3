"""The leaves of a tree: numbered for every link alike, mapped, and chosen between."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._core.checks import check_bools, shown


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a selection may know of a leaf: static, and the same on every worker.

    Attributes:
      index: position in the order of ``jax.tree.leaves``.
      shape: shape of the leaf; of one shard, where it is sharded over mesh axes.
      stacked: whether its first dimension counts layers, each with its own ratios.
      shards: the number of shards of each of its layers.
      axes: the mesh axes over which each of its layers is sharded.
      sharded: those over which the leaf is, which for a stack may be more.
      parts: the small leaves that are joined in it, one after the other.
      unit: the elements to a multiple of which each part is padded with zeros.
    """

    index: int
    shape: tuple[int, ...]
    stacked: bool = False
    shards: int = 1
    axes: tuple[Hashable, ...] = ()
    sharded: tuple[Hashable, ...] = ()
    parts: tuple["Leaf", ...] = ()
    unit: int = 1

    @property
    def size(self) -> int:
        """Number of elements of the leaf."""
        return math.prod(self.shape)

    @property
    def layers(self) -> int:
        """Number of layers in it."""
        return self.shape[0] if self.stacked else 1

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one of its layers."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def layer_size(self) -> int:
        """Number of elements of one of its layers, all shards together."""
        return math.prod(self.layer_shape) * self.shards


#: Of parameters, the :class:`Leaf` of each; see ``layout``.
LayoutOf: TypeAlias = Callable[[chex.ArrayTree], chex.ArrayTree]


def leaves_of(params: chex.ArrayTree, layout: LayoutOf | None = None) -> list[Leaf]:
    """The leaves of a tree, without those that are None."""
    return [leaf for leaf, _ in present(params, layout=layout)[0]]


def present(
    tree: chex.ArrayTree,
    *rest: chex.ArrayTree,
    like: chex.ArrayTree | None = None,
    layout: LayoutOf | None = None,
) -> tuple[list[tuple[Any, ...]], Callable[[Sequence[Any]], chex.ArrayTree]]:
    """The leaves that are not None as rows ``(Leaf, x, *others)``, and a rebuilder.

    They are numbered as ``like``, the parameters, has them: a missing gradient must not
    shift the numbers of those after it. The rebuilder makes a tree of one value for
    each row, with None where it was.
    """
    treedef: Any
    values, treedef = jax.tree.flatten(tree, is_leaf=is_none)
    models = values if like is None else treedef.flatten_up_to(like)
    leaves: list[Leaf | None] = [Leaf(0, ())] * len(values)
    if layout is not None:
        leaves = treedef.flatten_up_to(layout(tree if like is None else like))
    nothing = [None] * len(values)
    columns = [nothing if x is None else treedef.flatten_up_to(x) for x in rest]
    rows, index = [], 0
    for leaf, model, x, *others in zip(leaves, models, values, *columns, strict=True):
        if x is not None:
            leaf = dataclasses.replace(leaf, index=index, shape=x.shape)
            rows.append((leaf, x, *others))
        index += len(jax.tree.leaves(model))

    def rebuild(out: Sequence[Any]) -> chex.ArrayTree:
        given = iter(out)
        return treedef.unflatten([None if x is None else next(given) for x in values])

    return rows, rebuild


def is_function(x: Any) -> bool:
    """Whether it is a function of the parameters, and no tree like them.

    A model that is a tree may be callable, too: its leaves tell it from a function.
    """
    if not callable(x) or isinstance(x, jax.tree_util.Partial):
        return callable(x)
    return all(map(callable, jax.tree.leaves(x, is_leaf=is_none)))


def check_mask(name: str, mask: Any) -> None:
    """Raises unless it is None, a tree of bools or a function."""
    if mask is None or is_function(mask):
        return
    if jax.tree_util.all_leaves([mask]):
        # As of optax.inject_hyperparams, which calls a function with the step.
        raise ValueError(
            f"{name} must be None, bools or a function of the parameters, got "
            f"{shown(mask)}: pass static_args={name!r} to optax.inject_hyperparams"
        )
    check_bools(name, mask)


def bool_for_each(
    name: str, given: Any, params: chex.ArrayTree, default: bool = True
) -> chex.ArrayTree:
    """One bool per parameter, of a tree, a prefix of it, a function, or of None."""
    given = default if given is None else given
    tree = given(params) if is_function(given) else given
    check_bools(name, tree)
    return broadcast_prefix(name, tree, params)


def broadcast_prefix(
    name: str,
    tree: Any,
    params: chex.ArrayTree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> chex.ArrayTree:
    """A tree like the parameters from a prefix of one; ``name`` is for the error."""
    try:
        return jax.tree.map(
            lambda x, below: jax.tree.map(lambda _: x, below),
            tree,
            params,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        raise ValueError(
            f"{name} must have the structure of the parameters or a prefix of it: "
            f"{error}"
        ) from error


def map_present(
    fn: Callable[..., Any], tree: chex.ArrayTree, *rest: Any
) -> chex.ArrayTree:
    """``jax.tree.map`` that leaves None where ``tree`` has None."""
    return jax.tree.map(
        lambda x, *others: None if x is None else fn(x, *others),
        tree,
        *rest,
        is_leaf=is_none,
    )


def keep_absent(new: chex.ArrayTree, old: chex.ArrayTree) -> chex.ArrayTree:
    """``new``, with what ``old`` has where ``new`` has None; None for no ``old``."""
    if old is None:
        return None
    return jax.tree.map(lambda n, o: o if n is None else n, new, old, is_leaf=is_none)


def arrays_among(extra_args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The extra arguments that are trees of arrays, and the others."""

    def are_arrays(tree: Any) -> bool:
        return all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))

    arrays = {name: x for name, x in extra_args.items() if are_arrays(x)}
    return arrays, {k: x for k, x in extra_args.items() if k not in arrays}


def is_none(x: Any) -> bool:
    """Whether a leaf is missing."""
    return x is None


_LAST, _GO_ON = np.int32(2**31 - 1), np.int32(2**30)


def next_step(count: jax.Array) -> jax.Array:
    """The number of the next step, of an int32 ``count`` of those before it.

    After the largest it goes on from 2**30, as large for every power of a decay rate:
    with a count that stood still the same coordinates would be exchanged for ever.
    """
    return jnp.where(count == _LAST, _GO_ON, count + np.int32(1))


# By the ids of skip and of the array.
_CHOSEN: WeakValueDictionary[tuple[int, int], jax.Array] = WeakValueDictionary()


def unless(skip: jax.Array | None, old: chex.ArrayTree, new: chex.ArrayTree) -> Any:
    """``new``, or ``old`` if the step is skipped; None where ``new`` has None.

    A link that takes the extra argument ``skip`` of ``update``, a bool, calls this for
    each part of its state as soon as it has computed that part, before its updates
    depend on it. Then the new part takes the old one's memory. With a choice after all
    links ``adamw`` took 3.2 times the parameters' memory in temporaries on a CPU for
    0.2, and half of it more on a GPU.
    """
    if skip is None:
        return new

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        is_chosen = _CHOSEN.get((id(skip), id(new))) is new
        return new if is_chosen else jnp.where(skip, old, new)

    return map_present(choose, new, old)


def chosen(skip: jax.Array | None, state: Any) -> Any:
    """``state`` of a link that has called :func:`unless` for all of it.

    Its arrays are marked, and a wrapper does not choose again. The mark is of the
    arrays themselves: what a conditional or a map makes of them is chosen once more.
    """
    if skip is not None:
        _CHOSEN.update({(id(skip), id(x)): x for x in jax.tree.leaves(state)})
    return state
