"""Errors for bad input: each names the argument and the value."""

import math
import numbers
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from slamb_jax._core.axes import as_tuple, check_varies, varying_axes
from slamb_jax._core.rounding import is_complex


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
) -> None:
    """Raises unless ``value`` is in the interval; arrays pass, and schedules may."""
    if isinstance(value, jax.Array) or (schedule and callable(value)):
        return
    interval = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number in {interval}, got {shown(value)}")
    value = float(value)
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if not (above and below):  # a NaN fails both
        raise ValueError(f"{name} must be in {interval}, got {shown(value)}")


def check_integer(name: str, value: Any, low: int | None = None) -> None:
    """Raises unless ``value`` is an integer, and at least ``low``."""
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or (low is not None and value < low):
        bound = "" if low is None else f" of at least {low}"
        raise ValueError(f"{name} must be an integer{bound}, got {shown(value)}")


def check_bool(name: str, value: Any) -> None:
    """Raises unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(choices)}, got {shown(value)}"
        )


def check_transformation(name: str, tx: Any) -> None:
    """Raises unless ``tx`` is an optax transformation, made and not its maker."""
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"{name} must be an optax.GradientTransformation, got {shown(tx)}"
        )


def check_dtype(name: str, dtype: DTypeLike | None) -> jnp.dtype:
    """The dtype of a moment, float32 for None; raises unless it is one allowed."""
    try:
        found = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except TypeError:
        found = None
    if found not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(
            f"{name} must be None, float32 or bfloat16, got {shown(dtype)}"
        )
    return found


def check_axis_name(axis_name: Any, name: str = "axis_name") -> None:
    """Raises unless ``axis_name`` is None, a name or a tuple of names."""
    # jax takes a number for the position of an array's axis.
    not_names = numbers.Number | list | set | dict
    if axis_name == () or any(isinstance(n, not_names) for n in as_tuple(axis_name)):
        raise ValueError(
            f"{name} must be None, the name of a mesh axis or a tuple of names, got "
            f"{shown(axis_name)}"
        )


def check_static(names: tuple[str, ...], values: dict[str, Any]) -> None:
    """Raises for every named argument that ``inject_hyperparams`` made an array."""
    bad = [name for name in names if isinstance(values[name], jax.Array)]
    if bad:
        raise ValueError(
            f"{', '.join(bad)} must be static, got "
            f"{', '.join(repr(values[name]) for name in bad)}: pass "
            f"static_args={tuple(bad)!r} to optax.inject_hyperparams"
        )


def check_floating(tree: chex.ArrayTree, what: str) -> None:
    """Raises for a leaf that no optimizer can step along, and names it."""
    check_real(tree, what)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            found = shown(leaf) if dtype is None else dtype
            raise ValueError(
                f"{what} must be real floating point arrays, got {found} at "
                f"{what}{jax.tree_util.keystr(path)}"
            )


def check_real(tree: chex.ArrayTree, what: str) -> None:
    """Raises for a complex leaf, whose imaginary part would be dropped."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_complex(leaf):
            raise ValueError(
                f"{what} must be real, got {getattr(leaf, 'dtype', leaf)} at "
                f"{what}{jax.tree_util.keystr(path)}: make two arrays of its real and "
                "imaginary parts, as optax.contrib.split_real_and_imaginary(tx) does"
            )


def check_same_kind(updates: chex.ArrayTree, params: chex.ArrayTree) -> None:
    """Raises where one of update and parameter is complex; None is no update."""

    def check(path: Any, u: Any, p: Any) -> None:
        if u is not None and is_complex(u) != is_complex(p):
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} must be complex where its "
                f"parameter is, and real where that is, got {u.dtype} for {p.dtype}: "
                "take the real part (jax.numpy.real), or make the parameter complex"
            )

    jax.tree_util.tree_map_with_path(
        check, updates, params, is_leaf=lambda x: x is None
    )


def check_arrays(name: str, tree: chex.ArrayTree) -> None:
    """Raises for a leaf that is neither an array nor a number, and names it."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, numbers.Number):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be an array or a number, got "
                f"{shown(leaf)}"
            )


def check_gradients(updates: chex.ArrayTree, moments: chex.ArrayTree) -> None:
    """Raises for a gradient that does not fit its moment; None is none."""
    check_floating(updates, "updates")

    def check(path: Any, g: jax.Array | None, m: jax.Array) -> None:
        if g is None:
            return
        if g.shape != m.shape:
            raise ValueError(
                f"updates{jax.tree_util.keystr(path)} must have the shape of its "
                f"parameter, got {g.shape} for {m.shape}"
            )
        check_varies(path, g, varying_axes(m))

    jax.tree_util.tree_map_with_path(
        check, updates, moments, is_leaf=lambda x: x is None
    )


def check_callable(name: str, value: Any) -> None:
    """Raises unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {shown(value)}")


def check_params(params: Any) -> None:
    """Raises where an update that needs the parameters did not get them."""
    if params is None:
        raise ValueError(
            "params must be passed to update, got None: updates, state = "
            "tx.update(grads, state, params)"
        )


def check_bools(name: str, tree: Any) -> None:
    """Raises unless all leaves are bools, or arrays of them."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(x, bool) and getattr(x, "dtype", None) != jnp.dtype(bool):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{name} must have bools for leaves, got {shown(x)} at {where}"
            )
