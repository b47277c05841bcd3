"""Backward passes in branches: a gradient is computed only where a flag is set."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun, primitives

from slamb_jax._core import axes

Vjp: TypeAlias = Callable[[Any], tuple[Any, ...]]
# A gradient is computed always (None), never (()), or if a traced bool is set. None and
# () are empty trees, which stay static where custom_vjp passes them on.
Flag: TypeAlias = jax.Array | tuple[()] | None
Flags: TypeAlias = tuple[Flag, Flag]  # for the gradients of the weights and the inputs
_SAVED = ("dot_general", "conv_general_dilated", "random_bits", "random_wrap")


def call_if(
    transforms: Any, fun: Callable[..., Any], weights: Any, inputs: Any, flags: Flags
) -> Any:
    """Calls ``fun(weights, *inputs)``, whose two gradients are computed if flagged.

    ``transforms`` is ``jax``, or ``flax.linen`` if the weights are a module's.
    """

    def primal(weights: Any, flags: Flags, *inputs: Any) -> Any:
        return fun(weights, *inputs)

    def forward(weights: Any, flags: Flags, *inputs: Any) -> Any:
        saving = transforms.checkpoint(fun, policy=_is_saved, prevent_cse=False)
        y, vjp = transforms.vjp(saving, weights, *inputs)
        return y, (flags, vjp)

    def backward(residuals: tuple[Flags, Vjp], cotangent: Any) -> tuple[Any, ...]:
        of_weights, *of_inputs = _conditional_vjp(*residuals, cotangent)
        return of_weights, None, *of_inputs

    if transforms is jax:
        branching: Any = jax.custom_vjp(primal)
        branching.defvjp(forward, backward)
    else:
        branching = transforms.custom_vjp(primal, forward, backward)
    return branching(weights, flags, *inputs)


def _is_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is saved for the backward pass, or computed again there.

    What a branch reads must lie in memory, while XLA fuses most results away elsewhere:
    saving them all would cost more than a skipped layer saves.
    """
    return primitive.name in _SAVED


def _conditional_vjp(flags: Flags, vjp: Vjp, cotangent: Any) -> tuple[Any, ...]:
    """The results of ``vjp``, each computed if flagged and zeros otherwise."""

    def differentiable(cotangent: Any) -> Any:  # None for integers and keys
        none = jax.dtypes.float0
        return jax.tree.map(lambda x: None if x.dtype == none else x, vjp(cotangent))

    shapes = jax.eval_shape(differentiable, cotangent)

    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        x = jnp.zeros(like.shape, like.dtype)
        return axes.vary_over(x, axes.varying_axes(like))

    def branch(weights: bool, inputs: bool) -> tuple[Any, ...]:
        out = none = jax.tree.map(zeros, shapes)
        if weights or inputs:
            out = _call_with_fast_convolutions(differentiable, cotangent)
        of_inputs = out[1:] if inputs else none[1:]
        return out[0] if weights else none[0], *of_inputs

    def on(flag: Flag, fun: Callable[[bool], Any]) -> Any:
        if flag is None or isinstance(flag, tuple):
            return fun(flag is None)
        return axes.cond(flag, lambda: fun(True), lambda: fun(False))

    return on(flags[0], lambda x: on(flags[1], functools.partial(branch, x)))


def _call_with_fast_convolutions(vjp: Vjp, cotangent: Any) -> tuple[Any, ...]:
    """Calls ``vjp``; on a CPU its convolutions run over (batch, space, feature).

    XLA's CPU backend is fast in this order only, and does not reorder those of a branch
    by itself: a step of a small ResNet takes 2.9 s in place of 0.2 s (jax 0.10.2).
    """
    program, shapes = jax.make_jaxpr(vjp, return_shape=True)(cotangent)
    if "conv_general_dilated" not in str(program):
        return vjp(cotangent)

    def on_cpu(cotangent: Any) -> Any:
        out = jaxpr_as_fun(_reordered(program))(*jax.tree.leaves(cotangent))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return lax.platform_dependent(cotangent, cpu=on_cpu, default=vjp)


def _reordered(program: Any) -> Any:
    """A jaxpr, open or closed, whose convolutions are calls of :func:`_convolve`."""
    open_one = getattr(program, "jaxpr", program)  # itself, from jax 0.12 on
    if open_one is not program:
        return program.replace(jaxpr=_reordered(open_one))

    def reorder(eqn: Any) -> Any:
        if eqn.primitive is lax.conv_general_dilated_p:
            convolve = functools.partial(_convolve, **eqn.params)
            called = jax.make_jaxpr(convolve)(*(x.aval for x in eqn.invars))
            params = {"call_jaxpr": called}
            return eqn.replace(primitive=primitives.closed_call_p, params=params)
        of_eqn = eqn.params.items()
        inner = {k: _reordered(x) for k, x in of_eqn if hasattr(x, "eqns")}
        return eqn.replace(params=eqn.params | inner)

    return program.replace(eqns=[*map(reorder, program.eqns)])


def _convolve(
    x: jax.Array, kernel: jax.Array, *, dimension_numbers: Any, **params: Any
) -> jax.Array:
    """A convolution over (batch, space, feature), transposed from and to its order."""
    lhs, rhs, out = dimension_numbers  # places of batch, feature, space; out, in, space
    space = "0123456789"[: x.ndim - 2]
    params.pop("out_sharding", None)  # None: there is no explicit sharding here
    y = lax.conv_general_dilated(
        lax.transpose(x, (lhs[0], *lhs[2:], lhs[1])),
        lax.transpose(kernel, (*rhs[2:], rhs[1], rhs[0])),
        dimension_numbers=(f"N{space}C", f"{space}IO", f"N{space}C"),
        **params,
    )
    return lax.transpose(y, np.argsort((out[0], *out[2:], out[1])))
