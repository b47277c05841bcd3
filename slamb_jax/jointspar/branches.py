"""Backward passes in branches: a gradient is computed only where a flag is set."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp

from slamb_jax import _axes as axes
from slamb_jax._leaves import is_none
from slamb_jax.jointspar.convolutions import call_with_fast_convolutions

Vjp: TypeAlias = Callable[..., tuple[Any, Any]]
# Always (None), never (()), or a traced bool. As empty trees the first two stay static
# where they are passed through jax.custom_vjp.
Flag: TypeAlias = jax.Array | tuple[()] | None
Flags: TypeAlias = tuple[Flag, Flag]  # for the gradients of the weights and the inputs
_SAVED = ("dot_general", "conv_general_dilated", "random_bits", "random_wrap")


def train_function_if(
    flags: Flags, fun: Callable[..., Any], params: chex.ArrayTree, inputs: Any
) -> Any:
    """``fun(params, *inputs)``, each of whose two gradients is computed if flagged."""

    def call(weights: Any, inexact: Any, others: Any) -> Any:
        params, inputs = merge((weights, inexact), others)
        return fun(params, *inputs)

    def forward(flags: Flags, weights: Any, inexact: Any, others: Any) -> Any:
        saving = jax.checkpoint(call, policy=is_saved, prevent_cse=False)
        y, vjp = jax.vjp(lambda w, x: saving(w, x, others), weights, inexact)
        return y, (flags, vjp)

    def backward(residuals: tuple[Flags, Vjp], cotangent: Any) -> tuple[Any, ...]:
        return None, *conditional_vjp(*residuals, cotangent), None

    branching = jax.custom_vjp(lambda flags, *parts: call(*parts))
    branching.defvjp(forward, backward)
    (weights, inexact), others = partition((params, inputs))
    return branching(flags, weights, inexact, others)


def is_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is saved for the backward pass, or computed again there.

    Operands of a branch must lie in memory; without branches, XLA fuses most of them
    away. To save every intermediate result costs more than a skipped layer saves.
    """
    return primitive.name in _SAVED


def conditional_vjp(flags: Flags, vjp: Vjp, cotangent: Any) -> tuple[Any, Any]:
    """The two results of ``vjp``, each computed if flagged and zeros otherwise."""
    shapes = jax.eval_shape(vjp, cotangent)

    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        return axes.vary_over(
            jnp.zeros(like.shape, like.dtype), axes.varying_axes(like)
        )

    def branch(params: bool, inputs: bool) -> tuple[Any, Any]:
        found = none = jax.tree.map(zeros, shapes)
        if params or inputs:
            found = call_with_fast_convolutions(vjp, cotangent)
        return found[0] if params else none[0], found[1] if inputs else none[1]

    def on(flag: Flag, fun: Callable[[bool], Any]) -> Any:
        if flag is None or isinstance(flag, tuple):
            return fun(flag is None)
        return axes.cond(flag, lambda: fun(True), lambda: fun(False))

    own, below = flags
    return on(own, lambda params: on(below, functools.partial(branch, params)))


def partition(tree: chex.ArrayTree) -> tuple[chex.ArrayTree, chex.ArrayTree]:
    """The leaves that can be differentiated, and the others; None elsewhere."""

    def is_inexact(x: Any) -> bool:
        return jnp.issubdtype(jnp.result_type(x), jnp.inexact)

    inexact = jax.tree.map(lambda x: x if is_inexact(x) else None, tree)
    return inexact, jax.tree.map(lambda x: None if is_inexact(x) else x, tree)


def merge(inexact: chex.ArrayTree, others: chex.ArrayTree) -> chex.ArrayTree:
    """The tree of which these are the two parts."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, inexact, others, is_leaf=is_none
    )
