"""Backward passes in branches: a gradient is computed only where a flag is set."""

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp

from slamb_jax._tree import axes
from slamb_jax.jointspar.convolutions import with_fast_convolutions

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
    (weights, others), merge = partition((params, inputs))
    size = len(partition(params)[0][0])

    def call(params: list[Any], inputs: list[Any], others: list[Any]) -> Any:
        merged_params, merged_inputs = merge([*params, *inputs], others)
        return fun(merged_params, *merged_inputs)

    @jax.custom_vjp
    def branching(flags: Flags, params: Any, inputs: Any, others: Any) -> Any:
        return call(params, inputs, others)

    def forward(
        flags: Flags, params: Any, inputs: Any, others: Any
    ) -> tuple[Any, tuple[Flags, Vjp]]:
        saving = jax.checkpoint(call, policy=is_saved, prevent_cse=False)
        y, vjp = jax.vjp(lambda p, x: saving(p, x, others), params, inputs)
        return y, (flags, vjp)

    def backward(residuals: tuple[Flags, Vjp], cotangent: Any) -> tuple[Any, ...]:
        return None, *conditional_vjp(*residuals, cotangent), None

    branching.defvjp(forward, backward)
    return branching(flags, weights[:size], weights[size:], others)


def is_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether a result is saved for the backward pass, or computed again there.

    Operands of a branch must lie in memory; without branches, XLA fuses most of them
    away. To save every intermediate result costs more than a skipped layer saves.
    """
    return primitive.name in _SAVED


def conditional_vjp(flags: Flags, vjp: Vjp, cotangent: Any) -> tuple[Any, Any]:
    """The two results of ``vjp``, each computed if flagged and zeros otherwise."""
    shapes = jax.eval_shape(vjp, cotangent)
    pull_back = with_fast_convolutions(vjp)

    def select(params: bool, inputs: bool) -> Callable[[], tuple[Any, Any]]:
        def branch() -> tuple[Any, Any]:
            zeros = jax.tree.map(_zeros, shapes)
            found = pull_back(cotangent) if params or inputs else zeros
            return found[0] if params else zeros[0], found[1] if inputs else zeros[1]

        return branch

    def on(flag: Flag, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        if flag is None or isinstance(flag, tuple):
            return yes() if flag is None else no()
        return axes.cond(flag, yes, no)

    own, below = flags
    return on(
        own,
        lambda: on(below, select(True, True), select(True, False)),
        lambda: on(below, select(False, True), select(False, False)),
    )


def partition(
    tree: Any,
) -> tuple[tuple[list[Any], list[Any]], Callable[[list[Any], list[Any]], Any]]:
    """The leaves that can be differentiated, the others, and a function to merge."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    is_inexact = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]

    def merge(inexact: list[Any], others: list[Any]) -> Any:
        sources = iter(others), iter(inexact)
        return treedef.unflatten([next(sources[which]) for which in is_inexact])

    inexact = [x for x, which in zip(leaves, is_inexact, strict=True) if which]
    others = [x for x, which in zip(leaves, is_inexact, strict=True) if not which]
    return (inexact, others), merge


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = jnp.zeros(like.shape, like.dtype)
    return axes.vary_over(zeros, axes.varying_axes(like))
