"""A layer whose backward pass is computed only if the layer is to be trained."""

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
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


def train_if(
    active: Mapping[str, jax.Array] | None,
    name: str,
    layer: Callable[..., Any],
    *,
    below: Sequence[str] | None = None,
) -> Callable[..., Any]:
    r"""Wraps a layer so that its weight gradient is computed only if it is active.

    With :math:`y = f(w, x)` and the cotangent :math:`\bar y` of the output,

    .. math::

      \bar w = \begin{cases}
        \bar y\,\partial f / \partial w & \text{if the layer is active} \\
        0 & \text{otherwise}
      \end{cases} \qquad
      \bar x = \begin{cases}
        \bar y\,\partial f / \partial x & \text{if a layer of \texttt{below} is active}
        \\ 0 & \text{otherwise}
      \end{cases}

    in conditionals (``lax.cond``) of the backward pass: what is 0 is not computed. The
    forward pass is that of ``layer``; the results of matrix products and convolutions
    are saved, the cheap ones computed again. It works under ``jit``, ``shard_map`` and
    ``pmap``, and with ``jax.checkpoint`` inside or outside; under ``jax.vmap`` over the
    flags the result is right, while both branches are computed. Forward-mode
    differentiation is not supported.

    Args:
      active: the result of :func:`active_layers`. None returns ``layer``, such as for
        evaluation.
      name: the layer's label in the optimizer.
      layer: a function ``layer(params, *inputs)``; or a Flax linen module, called
        inside its parent's method; or a Flax nnx module. It must not close over
        arrays that are to be differentiated.
      below: the labels of all layers from which ``inputs`` are computed, empty for
        none: if all are inactive, the backward pass ends here. None if something below
        is always trained, or if the gradient of the inputs is wanted for itself.

    Returns:
      A function with the arguments and results of ``layer``. Keyword arguments are
      not differentiated.

    Raises:
      ValueError: for a name that is not a layer of the optimizer, and for a
        ``layer`` that cannot be called.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from slamb_jax import jointspar
      >>> dense = lambda w, x: jnp.tanh(x @ w)
      >>> def loss(params, active):
      ...     x = jnp.ones((2, 3))
      ...     x = jointspar.train_if(active, "a", dense, below=())(params["a"], x)
      ...     x = jointspar.train_if(active, "b", dense, below=("a",))(params["b"], x)
      ...     return x.sum()
      >>> params = {"a": jnp.ones((3, 3)), "b": jnp.ones((3, 3))}
      >>> active = {"a": jnp.array(False), "b": jnp.array(True)}
      >>> grads = jax.jit(jax.grad(loss))(params, active)
      >>> print(grads["a"].any(), grads["b"].any())
      False True

    References:
      Liu & Mozafari, `Communication-efficient Distributed Learning for Large Batch
      Optimization <https://proceedings.mlr.press/v162/liu22n.html>`_, ICML 2022.
    """
    if not callable(layer):
        raise ValueError(f"layer must be a function or a Flax module, got {layer!r}")
    if active is None:
        return layer
    _check_names(active, (name, *(below or ())))
    flags = active[name], below if below is None else _any(active, below)
    # A module of Flax can only be given where Flax was imported.
    if (linen := sys.modules.get("flax.linen")) and isinstance(layer, linen.Module):
        from slamb_jax.jointspar.flax_modules import train_linen_if

        return train_linen_if(flags, layer)
    if (nnx := sys.modules.get("flax.nnx")) and isinstance(layer, nnx.Module):
        from slamb_jax.jointspar.flax_modules import train_nnx_if

        return train_nnx_if(flags, layer)
    return lambda params, *inputs, **settings: train_function_if(
        flags, functools.partial(layer, **settings), params, inputs
    )


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


def _any(active: Mapping[str, jax.Array], names: Sequence[str]) -> Flag:
    if not names:
        return ()
    return functools.reduce(operator.or_, (active[name] for name in names))


def _check_names(active: Mapping[str, jax.Array], names: Sequence[str]) -> None:
    if not isinstance(active, Mapping):
        raise ValueError(f"active must be the result of active_layers, got {active!r}")
    for name in names:
        if name not in active:
            raise ValueError(
                f"there is no layer {name!r} in the optimizer, only "
                f"{', '.join(map(repr, active))}"
            )
