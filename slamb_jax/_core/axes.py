"""Mesh axes: their size, a worker's index, and the axes that a type varies over.

``axis_name`` is a name, or a tuple of names, bound by ``shard_map``, ``pmap`` or
``vmap``; None is a single worker.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import chex
import jax

Axes = frozenset[Hashable]
AxisName = Hashable | tuple[Hashable, ...]


def as_tuple(axis_name: AxisName | None) -> tuple[Hashable, ...]:
    """The names of an axis or axes; none for None."""
    if axis_name is None:
        return ()
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def axis_size(axis_name: AxisName | None) -> int:
    """The number of workers n; 1 without an axis.

    Raises:
      ValueError: if ``axis_name`` is not bound where this is called.
    """
    if axis_name is None:
        return 1
    try:
        return int(jax.lax.psum(1, axis_name))  # of a constant: nothing is sent
    except (NameError, KeyError) as error:
        raise ValueError(
            f"axis_name={axis_name!r} is not bound here. A transformation that "
            "exchanges must be updated inside jax.shard_map, jax.pmap or jax.vmap "
            "over an axis of that name (slamb_jax.per_worker_step does it); "
            "Exchange() without an axis is for a single worker."
        ) from error


def is_bound(axis_name: Hashable) -> bool:
    """Whether the axis is bound (manual) where this is called."""
    try:
        jax.lax.axis_index(axis_name)
    except NameError:
        return False
    return True


def varying_axes(x: Any) -> Axes:
    """The mesh axes that the type of ``x`` says it varies over.

    Empty under ``vmap``, ``pmap`` and ``check_vma=False``, whose types do not say.
    """
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    manual = getattr(aval, "manual_axis_type", None)  # jax 0.10 and newer
    axes = getattr(aval, "vma", None) if manual is None else manual.varying
    return frozenset(axes or ())


def vary_over(x: jax.Array, axes: Axes) -> jax.Array:
    """``x`` with a type that varies over ``axes`` too, which costs nothing."""
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    if not missing:
        return x
    if not hasattr(jax.lax, "pcast"):  # jax 0.8.0 and 0.8.1
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]
    return jax.lax.pcast(x, missing, to="varying")


def tracked_axes(axis_name: AxisName) -> Axes:
    """The subset of the axes that ``check_vma=True`` tracks in types."""
    return varying_axes(jax.lax.axis_index(axis_name))


def cond(
    pred: jax.Array,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
) -> Any:
    """``lax.cond`` whose branches may differ in the axes their results vary over."""
    branches = true_fun, false_fun
    axes = jax.tree.map(
        lambda x, y: varying_axes(x) | varying_axes(y),
        *(jax.eval_shape(fun, *operands) for fun in branches),
    )

    def widened(fun: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.map(vary_over, fun(*args), axes)

    return jax.lax.cond(pred, *map(widened, branches), *operands)


def missed_axes(tree: chex.ArrayTree, known: Sequence[Hashable]) -> list[Hashable]:
    """The axes but for those known over which types say that devices differ."""
    axes = frozenset[Hashable]().union(*map(varying_axes, jax.tree.leaves(tree)))
    missed = sorted(axes - set(known), key=str)
    return [axis for axis in missed if axis_size(axis) > 1]


def check_local(
    updates: chex.ArrayTree,
    axis_name: AxisName | None,
    shard_axes: tuple[Hashable, ...] = (),
) -> None:
    """Raises for gradients that were averaged already, where types show it.

    They must vary over ``axis_name`` wherever types are tracked (``shard_map`` with
    ``check_vma=True``); without one they must not vary, other than between shards.
    Elsewhere gradients that were averaged cannot be told from those that were not.
    With one they may vary over more axes: the mean in a group of devices is typed as
    the parameters are, which vary there.
    """
    if axis_name is None:
        for axis in missed_axes(updates, shard_axes):
            raise ValueError(
                f"axis_name=None exchanges nothing over the mesh axis {axis!r}, over "
                "which the gradients differ: give the optimizer the exchange of "
                f"slamb_jax.per_worker_step, such as slamb_jax.Exchange({axis!r}); or, "
                "if the axis is one of shards, name it in param_specs"
            )
        return
    axis_size(axis_name)  # raises for an unbound axis
    tracked = tracked_axes(axis_name)
    for path, x in jax.tree_util.tree_leaves_with_path(updates):
        where = f"updates{jax.tree_util.keystr(path)}"
        check_varies(where, x, tracked)


def check_varies(where: str, x: jax.Array, axes: Axes) -> None:
    """Raises for a gradient whose type does not vary over all of these axes."""
    missing = axes - varying_axes(x)
    if not missing or not x.size:  # without elements, jax.grad does not differentiate
        return
    names = ", ".join(sorted(map(repr, missing)))
    varying = sorted(varying_axes(x), key=str)
    raise ValueError(
        f"{where} does not vary over the mesh axis {names}, but over {varying}: it was "
        "summed or averaged already, as jax.grad inside jax.shard_map does for "
        "parameters that do not vary. Let slamb_jax.replicate and slamb_jax."
        "per_worker_step hand over the parameters, or cast them with jax.lax.pcast("
        f"params, {names}, to='varying') before jax.grad, and do not average gradients "
        "yourself. Or the optimizer's exchange is not that of per_worker_step"
    )
