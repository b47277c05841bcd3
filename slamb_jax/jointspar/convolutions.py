"""Convolutions with the dimensions in the one order that XLA's CPU backend runs fast.

The backend reorders those of the outermost computation, not those within a branch:
there, the gradient of a convolution's weights takes sixty times as long.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.typing import ArrayLike

_CONVOLUTION = lax.conv_general_dilated_p
# Calls that are evaluated in place; convolutions in a loop keep their order.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")


def with_fast_convolutions(fun: Callable[..., Any]) -> Callable[..., Any]:
    """``fun``, whose convolutions run over (batch, space, feature) if on a CPU."""

    def reordered(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        if not _convolves(program.jaxpr):
            return fun(*args)

        def on_cpu(*args: Any) -> Any:
            out = _evaluate(program, jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), out)

        return lax.platform_dependent(*args, cpu=on_cpu, default=fun)

    return reordered


def _evaluate(program: core.ClosedJaxpr, args: Sequence[ArrayLike]) -> list[ArrayLike]:
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> ArrayLike:
        return x.val if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        out = _apply(eqn, [read(x) for x in eqn.invars])
        values |= dict(zip(eqn.outvars, out, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _apply(eqn: core.JaxprEqn, operands: list[Any]) -> list[ArrayLike]:
    if eqn.primitive is _CONVOLUTION:
        return [_convolve(*operands, **eqn.params)]
    if eqn.primitive.name in _CALLS and any(map(_convolves, _inner(eqn))):
        (inner,) = _inner(eqn)
        called = eqn.params["jaxpr"]  # open in a checkpoint
        return _evaluate(
            core.ClosedJaxpr(inner, getattr(called, "consts", ())), operands
        )
    # A list of functions and the parameters before jax 0.10.
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ([], params)
    out = eqn.primitive.bind(*functions, *operands, **params)
    return out if eqn.primitive.multiple_results else [out]


def _convolve(
    x: jax.Array, kernel: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """A convolution over (batch, space, feature), transposed from and to its order."""
    batch, feature, *space = dimension_numbers.lhs_spec
    x = lax.transpose(x, (batch, *space, feature))
    out, into, *space = dimension_numbers.rhs_spec
    kernel = lax.transpose(kernel, (*space, into, out))
    last, middle = x.ndim - 1, range(1, x.ndim - 1)
    numbers = lax.ConvDimensionNumbers(
        (0, last, *middle), (last, last - 1, *range(last - 1)), (0, last, *middle)
    )
    params.pop("out_sharding", None)  # None: there is no explicit sharding here
    y = lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **params)
    batch, feature, *space = dimension_numbers.out_spec
    order = (batch, *space, feature)
    return lax.transpose(y, [order.index(i) for i in range(y.ndim)])


def _convolves(jaxpr: core.Jaxpr) -> bool:
    return any(
        eqn.primitive is _CONVOLUTION or any(map(_convolves, _inner(eqn)))
        for eqn in jaxpr.eqns
    )


def _inner(eqn: core.JaxprEqn) -> list[core.Jaxpr]:
    found = [x for x in eqn.params.values() if hasattr(x, "eqns")]
    return [getattr(x, "jaxpr", x) for x in found]
