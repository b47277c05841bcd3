"""Convolutions in the one order of dimensions that XLA's CPU backend is quick in.

It brings those of a program's outermost computation into that order by itself, but not
those in a branch: the gradient of a layer's weights takes sixty times as long there.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend import core

_CONVOLUTION = lax.conv_general_dilated_p
# What is computed in place; in a loop within the branch they stay as they are.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")


def with_ordered_convolutions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """``fun``, its convolutions over (batch, space, feature); the numbers stay."""

    def ordered(*args: Any) -> Any:
        treedef: Any
        leaves, treedef = jax.tree.flatten(args)

        def flat(*leaves: Any) -> Any:
            return fun(*treedef.unflatten(leaves))

        program, shape = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        if not _convolves(program.jaxpr):
            return fun(*args)
        out = _evaluate(program, leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return ordered


def _evaluate(program: core.ClosedJaxpr, args: Any) -> list[Any]:
    """Runs a program, equation by equation."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        out = _step(eqn, [value(x) for x in eqn.invars])
        values |= dict(zip(eqn.outvars, out, strict=True))
    return [value(x) for x in jaxpr.outvars]


def _step(eqn: Any, operands: list[Any]) -> list[Any]:
    if eqn.primitive is _CONVOLUTION:
        return [_ordered(*operands, **eqn.params)]
    if eqn.primitive.name in _CALLS and (inner := _inside(eqn)):
        program = eqn.params["jaxpr"]
        if not isinstance(program, core.ClosedJaxpr):
            program = core.ClosedJaxpr(program, ())
        if _convolves(inner[0]):
            return _evaluate(program, operands)
    # Before jax 0.10 functions come apart from the parameters, as a list.
    given = eqn.primitive.get_bind_params(eqn.params)
    functions, params = given if isinstance(given, tuple) else ([], given)
    out = eqn.primitive.bind(*functions, *operands, **params)
    return out if eqn.primitive.multiple_results else [out]


def _ordered(
    x: jax.Array, kernel: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """One convolution, its operands and its result transposed where they need it."""
    batch, feature, *space = dimension_numbers.lhs_spec
    x = lax.transpose(x, (batch, *space, feature))
    out, into, *space = dimension_numbers.rhs_spec
    kernel = lax.transpose(kernel, (*space, into, out))
    last = x.ndim - 1
    middle = tuple(range(1, last))
    ordered = lax.ConvDimensionNumbers(
        (0, last, *middle), (last, last - 1, *range(last - 1)), (0, last, *middle)
    )
    params.pop("out_sharding", None)  # of explicit sharding: there is none here
    y = lax.conv_general_dilated(x, kernel, dimension_numbers=ordered, **params)
    batch, feature, *space = dimension_numbers.out_spec
    wanted = (batch, *space, feature)
    return lax.transpose(y, [wanted.index(i) for i in range(y.ndim)])


def _convolves(jaxpr: core.Jaxpr) -> bool:
    return any(
        eqn.primitive is _CONVOLUTION or any(map(_convolves, _inside(eqn)))
        for eqn in jaxpr.eqns
    )


def _inside(eqn: Any) -> list[core.Jaxpr]:
    found = [x for x in eqn.params.values() if hasattr(x, "eqns")]
    return [getattr(x, "jaxpr", x) for x in found]
