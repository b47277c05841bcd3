"""Convolutions with the dimensions in the one order that XLA's CPU backend runs fast.

The backend reorders those of the outermost computation, not those within a branch:
there, the gradient of a convolution's weights takes sixty times as long.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

_CONVOLUTION = lax.conv_general_dilated_p
# Calls that are evaluated in place; convolutions in a loop keep their order.
_CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat2")


def call_with_fast_convolutions(fun: Callable[..., Any], *args: Any) -> Any:
    """``fun(*args)``; on a CPU its convolutions run over (batch, space, feature)."""
    program, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    if not _convolves(program):
        return fun(*args)

    def on_cpu(*args: Any) -> Any:
        out = _evaluate(program, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return lax.platform_dependent(*args, cpu=on_cpu, default=fun)


def _evaluate(program: Any, args: Sequence[Any]) -> list[Any]:
    jaxpr = getattr(program, "jaxpr", program)  # open in a checkpoint, else closed
    values = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    values |= dict(zip(jaxpr.invars, args, strict=True))

    def read(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else values[x]

    for eqn in jaxpr.eqns:
        out: Any
        operands = [read(x) for x in eqn.invars]
        if eqn.primitive is _CONVOLUTION:
            out = _convolve(*operands, **eqn.params)
        elif eqn.primitive.name in _CALLS and any(map(_convolves, _inner(eqn))):
            (called,) = _inner(eqn)
            out = _evaluate(called, operands)
        else:  # a list of functions and the parameters before jax 0.10
            params = eqn.primitive.get_bind_params(eqn.params)
            functions, params = params if isinstance(params, tuple) else ([], params)
            out = eqn.primitive.bind(*functions, *operands, **params)
        results = out if eqn.primitive.multiple_results else [out]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


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


def _convolves(program: Any) -> bool:
    return any(
        eqn.primitive is _CONVOLUTION or any(map(_convolves, _inner(eqn)))
        for eqn in program.eqns
    )


def _inner(eqn: core.JaxprEqn) -> list[Any]:
    """The programs, open or closed, that an equation calls."""
    return [x for x in eqn.params.values() if hasattr(x, "eqns")]
