"""Whether all devices of a group compute the same state, read off a program."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from slamb_jax._axes import AxisName

# What gives all devices along its axes the same.
_JOIN = {
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather",
    "all_gather_invariant",
}  # fmt: skip
_KEEP_FALSE = {
    "broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy", "pvary",
    "pcast", "expand_dims",
}  # fmt: skip


class _Known(NamedTuple):
    """Of a value: the axes over which it may differ, and whether it is but False."""

    differs: frozenset[Any] = frozenset()
    false: bool = False


def check_same_state(
    step: Callable[..., tuple[Any, Any]],
    state: Any,
    rest: Sequence[Any],
    local_axis_name: AxisName,
) -> tuple[Any, Any]:
    """``step(state, *rest)``, unless its new state may differ within a group.

    The state is taken to be the same on all devices of a group, the rest to differ.
    What comes of both differs, but for what a sum, a maximum or a gathering over the
    axis made the same; so a state that passes is the same to the last bit. Types
    (``check_vma``) cannot tell, for the gradient to be one of the device's own share
    they must take the parameters to differ.

    Raises:
      ValueError: for a leaf of the new state that may differ.
    """
    # As a jaxpr, which is what there is to look at; it is run as it was read.
    jaxpr, shapes = jax.make_jaxpr(step, return_shape=True)(state, *rest)
    leaves = jax.tree.leaves((state, *rest))
    names = (
        local_axis_name if isinstance(local_axis_name, tuple) else (local_axis_name,)
    )
    same = len(jax.tree.leaves(state))
    given = [_Known(frozenset() if i < same else frozenset(names))
             for i in range(len(leaves))]  # fmt: skip
    found = iter(_outcome(jaxpr.jaxpr, [_constant(c) for c in jaxpr.consts], given))
    new, _ = shapes
    for path, _ in jax.tree_util.tree_leaves_with_path(new):
        if next(found).differs & frozenset(names):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} that step returned may differ "
                f"between the devices of a group, along local_axis_name="
                f"{local_axis_name!r}, of which it is to be the same: it comes of the "
                "device's own share of the batch, or key. Average it over the axis "
                "(slamb_jax.average_parameters for statistics; "
                "slamb_jax.average_gradients before slamb_jax.accumulate), let "
                "slamb_jax.skip_not_finite look at all axes, or report it instead."
            )
    out = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _outcome(jaxpr: Any, consts: Sequence[_Known], args: Sequence[_Known]) -> Any:
    """What is known of the results of a jaxpr."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> _Known:
        if hasattr(atom, "val"):
            return _constant(atom.val)
        return known[atom]

    for eqn in jaxpr.eqns:
        out = _of_equation(eqn, [read(x) for x in eqn.invars])
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _of_equation(eqn: Any, given: list[_Known]) -> list[_Known]:
    name, params, many = eqn.primitive.name, eqn.params, len(eqn.outvars)
    if name == "cond":
        index, *args = given
        runs = [_run(b, args) for b in params["branches"]]
        return [_union(*column, index) for column in zip(*runs, strict=True)]
    if name == "while":
        return _of_while(params, given)
    if name == "scan":
        return _of_scan(params, given)
    inner = [p for p in params.values() if _is_jaxpr(p)]
    if len(inner) == 1 and len(_open(inner[0]).invars) == len(given):
        return _run(inner[0], given)
    if name == "select_n" and given[0].false:
        return [given[1]]
    axes = _axes(params)
    if name == "axis_index":
        return [_Known(axes)]
    every = _union(*given)
    if name in _JOIN and params.get("axis_index_groups") is None:
        every = _Known(every.differs - axes)
    if name in _KEEP_FALSE and given[0].false:
        every = given[0]
    return [every] * many


def _of_while(params: Any, given: list[_Known]) -> list[_Known]:
    first, second = params["cond_nconsts"], params["body_nconsts"]
    test, body = given[:first], given[first : first + second]

    def turn(carry: list[_Known]) -> list[_Known]:
        (again,) = _run(params["cond_jaxpr"], [*test, *carry])
        return [_union(x, again) for x in _run(params["body_jaxpr"], [*body, *carry])]

    return _settled(turn, given[first + second :])


def _of_scan(params: Any, given: list[_Known]) -> list[_Known]:
    if "ft_in" in params:  # jax 0.12 and newer
        first, carried, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        first, carried = params["num_consts"], params["num_carry"]
    consts, xs = given[:first], given[first + carried :]

    def run(carry: list[_Known]) -> list[_Known]:
        return _run(params["jaxpr"], [*consts, *carry, *xs])

    carry = _settled(lambda c: run(c)[:carried], given[first : first + carried])
    return [*carry, *run(carry)[carried:]]


def _settled(
    turn: Callable[[list[_Known]], list[_Known]], carry: list[_Known]
) -> list[_Known]:
    """What is known after any number of turns."""
    carry = [_Known(x.differs) for x in carry]
    while True:
        joined = [_union(a, b) for a, b in zip(carry, turn(carry), strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _run(jaxpr: Any, given: Sequence[_Known]) -> list[_Known]:
    consts = [_constant(c) for c in getattr(jaxpr, "consts", ())]
    return _outcome(_open(jaxpr), consts, given)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(_open(x), "eqns") and hasattr(_open(x), "invars")


def _constant(value: Any) -> _Known:
    """A constant is the same everywhere; one that is False masks what is behind it."""
    known = not isinstance(value, jax.core.Tracer)
    is_bool = getattr(value, "dtype", None) == np.bool_ or isinstance(value, bool)
    return _Known(false=bool(known and is_bool and not np.any(np.asarray(value))))


def _axes(params: Any) -> frozenset[Any]:
    axes = params.get("axes", params.get("axis_name", ()))
    return frozenset(axes if isinstance(axes, tuple | list) else (axes,))


def _union(*known: _Known) -> _Known:
    return _Known(frozenset().union(*(x.differs for x in known)))
