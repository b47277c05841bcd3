"""Errors for bad input: each names the argument and the value."""

import math
import numbers
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from slamb_jax._core.axes import as_tuple, check_varies, varying_axes

#: A usual decay rate, which an array of one must hold.
NEAR_ONE = 0.999
#: A usual epsilon.
SMALL = 1e-8


def shown(value: Any) -> str:
    """A value as an error prints it: a long one by its type."""
    text = repr(value)
    return text if len(text) < 200 else f"a {type(value).__name__}"


def check_range(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    schedule: bool = False,
    holds: float | None = None,
) -> None:
    """Raises unless ``value`` is in the interval; what is traced passes, schedules may.

    An array must have a dtype that ``holds`` this usual value of the argument.
    """
    if schedule and callable(value):
        return
    interval = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
    dtype = getattr(value, "dtype", None)
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if dtype is not None:
        kinds = jnp.floating, jnp.integer
        real = not value.ndim and any(jnp.issubdtype(dtype, kind) for kind in kinds)
    way_out = ": optax.inject_hyperparams takes schedules" if callable(value) else ""
    if not real:
        got = shown(value)
        raise ValueError(f"{name} must be a number in {interval}, got {got}{way_out}")
    if dtype is not None and dtype.itemsize < 4:
        way_out = ": pass hyperparam_dtype=jnp.float32 to optax.inject_hyperparams"
        # 16 bits may round a usual value, or its distance to 1, away.
        if holds is not None and jnp.issubdtype(dtype, jnp.floating):
            rounded = float(np.asarray(holds, dtype))
            if abs(rounded - holds) > 0.01 * min(holds, 1 - holds):
                raise ValueError(
                    f"{name} must be of 32 bits, got {shown(value)}: in {dtype} "
                    f"{holds:g} is {rounded:g}{way_out}"
                )
    number = known(value)
    if number is None:
        return
    if holds is not None:
        interval += " in float32"  # in which it is computed with
        with np.errstate(over="ignore"):
            number = float(np.float32(number))
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):  # a NaN fails both
        raise ValueError(f"{name} must be in {interval}, got {shown(value)}{way_out}")


def check_decay_rate(name: str, value: Any, *, open_low: bool = False) -> None:
    """Raises unless ``value`` is in [0, 1), and not of 16 bits, in which 0.999 is 1."""
    check_range(
        name, value, 0.0, 1.0, open_low=open_low, open_high=True, holds=NEAR_ONE
    )


def known(value: Any) -> float | None:
    """A number or an array as a float; None where it is traced, and has no value."""
    if isinstance(value, jax.core.Tracer):
        return None
    return float(jax.device_get(value))


def check_value(is_right: bool, name: str, what: str, value: Any) -> None:
    """Raises for a wrong value that is no hyperparameter.

    ``optax.inject_hyperparams`` makes an array of a number, and of what a function
    returns for the step. It cannot know which arguments are hyperparameters.
    """
    if is_right:
        return
    way_out = ""
    if isinstance(value, jax.Array):
        way_out = (
            f": pass static_args={name!r} to optax.inject_hyperparams, with all others "
            "that are no hyperparameters"
        )
    raise ValueError(f"{name} must be {what}, got {shown(value)}{way_out}")


def check_integer(name: str, value: Any, low: int | None = None) -> None:
    """Raises unless ``value`` is an integer, and at least ``low``."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    bound = "" if low is None else f" of at least {low}"
    is_right = is_whole and (low is None or value >= low)
    check_value(is_right, name, f"an integer{bound}", value)


def check_bool(name: str, value: Any) -> None:
    """Raises unless ``value`` is True or False."""
    check_value(isinstance(value, bool), name, "True or False", value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises unless ``value`` is one of ``choices``."""
    is_one = isinstance(value, str) and value in choices
    check_value(is_one, name, f"one of {', '.join(choices)}", value)


def check_transformation(name: str, tx: Any) -> None:
    """Raises unless ``tx`` is an optax transformation, made and not its maker."""
    is_one = isinstance(tx, optax.GradientTransformation)
    check_value(is_one, name, "an optax.GradientTransformation", tx)


def check_static(name: str, value: Any) -> None:
    """Raises for what is no hyperparameter, and yet an array."""
    check_value(not isinstance(value, jax.Array), name, "static", value)


def check_dtype(name: str, dtype: DTypeLike | None) -> jnp.dtype:
    """The dtype of a moment, float32 for None; raises unless it is one allowed."""
    try:
        if isinstance(dtype, jax.Array):  # numpy would take the dtype of one
            raise TypeError
        of_moment = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError:
        of_moment = None
    is_allowed = of_moment in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))
    check_value(is_allowed, name, "None, float32 or bfloat16", dtype)
    assert of_moment is not None
    return of_moment


def check_axis_name(axis_name: Any, name: str = "axis_name") -> None:
    """Raises unless ``axis_name`` is None, a name or a tuple of names."""
    # jax takes a number for the position of an array's axis.
    other = numbers.Number | list | set | dict
    is_right = axis_name != () and not any(
        isinstance(part, other) for part in as_tuple(axis_name)
    )
    what = "None, the name of a mesh axis or a tuple of names"
    check_value(is_right, name, what, axis_name)


def check_params(params: Any) -> None:
    """Raises where an update that needs the parameters did not get them."""
    if params is None:
        raise ValueError("params must be passed to update, got None")


def check_floating(tree: chex.ArrayTree, what: str) -> None:
    """Raises for a leaf that no optimizer can step along, and names it."""
    for where, leaf in named_leaves(what, tree).items():
        if not jnp.issubdtype(getattr(leaf, "dtype", object), jnp.floating):
            check_real(tree, what)  # which knows a way out
            got = getattr(leaf, "dtype", shown(leaf))
            raise ValueError(
                f"{what} must be real floating point arrays, got {got} at {where}"
            )


def is_complex(x: Any) -> bool:
    """Whether an array, its shape and dtype, or a number is complex."""
    return jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.complexfloating)


def check_real(tree: chex.ArrayTree, what: str) -> None:
    """Raises for a complex leaf, whose imaginary part would be dropped."""
    for where, leaf in named_leaves(what, tree).items():
        if is_complex(leaf):
            raise ValueError(
                f"{what} must be real, got {getattr(leaf, 'dtype', leaf)} at {where}: "
                "make two arrays of it, as optax.contrib.split_real_and_imaginary does"
            )


def check_bools(name: str, tree: Any) -> None:
    """Raises unless all leaves are bools, or arrays of one bool that is known."""
    for where, x in named_leaves(name, tree).items():
        of_bool = getattr(x, "dtype", None) == jnp.dtype(bool) and not x.ndim
        if not isinstance(x, bool) and (not of_bool or isinstance(x, jax.core.Tracer)):
            raise ValueError(
                f"{name} must have bools for leaves, got {shown(x)} at {where}"
            )


def named_leaves(name: str, tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of an argument by the names that errors give them."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {name + jax.tree_util.keystr(path): x for path, x in flat}


def check_gradients(updates: chex.ArrayTree, moments: chex.ArrayTree) -> None:
    """Raises for a gradient that does not fit its moment; None is none."""
    check_floating(updates, "updates")
    treedef: Any
    flat, treedef = jax.tree_util.tree_flatten_with_path(updates, lambda x: x is None)
    for (path, g), m in zip(flat, treedef.flatten_up_to(moments), strict=True):
        if g is not None:
            where = f"updates{jax.tree_util.keystr(path)}"
            if g.shape != m.shape:
                raise ValueError(f"{where} must have shape {m.shape}, got {g.shape}")
            check_varies(where, g, varying_axes(m))
