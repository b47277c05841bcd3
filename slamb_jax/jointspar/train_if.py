"""A layer whose backward pass is computed only if the layer is to be trained."""

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp

from slamb_jax._core import axes
from slamb_jax._core.platform import run_on_cpu

Tree: TypeAlias = chex.ArrayTree
Layer: TypeAlias = Callable[..., Tree]
Vjp: TypeAlias = Callable[[Tree], tuple[Tree, ...]]
# A gradient is computed always (None), never (()), or if a traced bool is set. None and
# () are empty trees, which stay static where custom_vjp passes them on.
Flag: TypeAlias = jax.Array | tuple[()] | None
Flags: TypeAlias = tuple[Flag, Flag]  # for the gradients of the weights and the inputs
# Results that are saved for the backward pass; others are computed again there. What a
# branch reads must lie in memory, while XLA fuses most results away elsewhere: saving
# them all would cost more than a skipped layer saves.
_SAVED = ("dot_general", "conv_general_dilated", "random_bits", "random_wrap")


def train_if(
    active: Mapping[str, jax.Array] | None,
    name: str,
    layer: Layer,
    *,
    below: Sequence[str] | None = None,
) -> Layer:
    r"""Wraps a layer so that its weight gradient is computed only if it is active.

    With :math:`y = f(w, x)` and the cotangent :math:`\bar y` of the output,

    .. math::

      \bar w = a\,\bar y\,\partial f / \partial w, \qquad
      \bar x = b\,\bar y\,\partial f / \partial x,

    a is 1 if the layer is active, b is 1 if a layer of ``below`` is, and both are 0
    otherwise. ``lax.cond`` in the backward pass does not compute a gradient of 0. The
    results of matrix products and convolutions are saved for it, cheaper ones computed
    again. ``jax.vmap`` over the flags computes both branches. Forward-mode
    differentiation is not supported.

    Args:
      active: the result of :func:`active_layers`. None returns ``layer`` itself.
      name: the layer's label in the optimizer.
      layer: a function ``layer(params, *inputs)``, which must not close over arrays
        that are to be differentiated; or a Flax linen module, called inside its
        parent's method; or a Flax nnx module.
      below: the labels of all layers from which ``inputs`` are computed: if all are
        inactive, or there are none, the backward pass ends here. None if parameters
        below are trained at every step, or the gradient of the inputs is wanted.

    Returns:
      A function as ``layer``, whose keyword arguments are not differentiated.

    Raises:
      ValueError: for a name that is no layer of the optimizer, and a ``layer`` that
        cannot be called.

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
    """
    if not callable(layer):
        raise ValueError(f"layer must be a function or a Flax module, got {layer!r}")
    if active is None:
        return layer
    if not isinstance(active, Mapping):
        raise ValueError(f"active must be the result of active_layers, got {active!r}")
    for label in (name, *(below or ())):
        if label not in active:
            raise ValueError(f"there is no layer {label!r}, only {[*active]}")
    reached: Flag = None if below is None else ()
    if below:
        reached = functools.reduce(operator.or_, [active[x] for x in below])
    run = functools.partial(_call_if, flags=(active[name], reached))
    # This library never imports Flax: it is there if the layer is a module of it.
    linen: Any = sys.modules.get("flax.linen")
    nnx: Any = sys.modules.get("flax.nnx")

    def train_linen(*inputs: Tree, **settings: Any) -> Tree:
        return run(linen, lambda module, *x: module(*x, **settings), layer, inputs)

    def train_nnx(*inputs: Tree, **settings: Any) -> Tree:
        def call(params: Tree, rest: Tree, *inputs: Tree) -> tuple[Tree, Tree]:
            module = nnx.merge(graph, params, rest, copy=True)
            y = module(*inputs, **settings)
            return y, nnx.state(module, nnx.Not(nnx.Param))

        graph, params, rest = nnx.split(layer, nnx.Param, ...)
        rest = jax.lax.stop_gradient(rest)  # statistics and keys
        y, rest = run(jax, call, params, (rest, *inputs))
        nnx.update(layer, rest)
        return y

    def train_function(params: Tree, *inputs: Tree, **settings: Any) -> Tree:
        return run(jax, functools.partial(layer, **settings), params, inputs)

    if linen and isinstance(layer, linen.Module):
        return train_linen
    return train_nnx if nnx and isinstance(layer, nnx.Module) else train_function


def _call_if(
    transforms: Any, fun: Callable[..., Tree], weights: Tree, inputs: Tree, flags: Flags
) -> Tree:
    """Calls ``fun(weights, *inputs)``, whose two gradients are computed if flagged.

    ``transforms`` is ``jax``, or ``flax.linen`` if the weights are a module's.
    """

    def primal(weights: Tree, flags: Flags, *inputs: Tree) -> Tree:
        return fun(weights, *inputs)

    def forward(weights: Tree, flags: Flags, *inputs: Tree) -> Any:
        policy = lambda primitive, *_, **__: primitive.name in _SAVED  # noqa: E731
        saving = transforms.checkpoint(fun, policy=policy, prevent_cse=False)
        y, vjp = transforms.vjp(saving, weights, *inputs)
        return y, (flags, vjp)

    def backward(residuals: tuple[Flags, Vjp], cotangent: Tree) -> tuple[Tree, ...]:
        weights, *inputs = _conditional_vjp(*residuals, cotangent)
        return weights, None, *inputs

    if transforms is jax:
        branching: Any = jax.custom_vjp(primal)
        branching.defvjp(forward, backward)
    else:
        branching = transforms.custom_vjp(primal, forward, backward)
    return branching(weights, flags, *inputs)


def _conditional_vjp(flags: Flags, vjp: Vjp, cotangent: Tree) -> tuple[Tree, ...]:
    """The results of ``vjp``, each computed if flagged and zeros otherwise."""

    def differentiable(cotangent: Tree) -> Tree:  # None for integers and keys
        none = jax.dtypes.float0
        return jax.tree.map(lambda x: None if x.dtype == none else x, vjp(cotangent))

    shapes = jax.eval_shape(differentiable, cotangent)

    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        return axes.vary_over(jnp.zeros_like(like), axes.varying_axes(like))

    def gradients(cotangent: Tree, weights: bool, inputs: bool) -> tuple[Tree, ...]:
        none = jax.tree.map(zeros, shapes)
        out = differentiable(cotangent) if weights or inputs else none
        return (out if weights else none)[0], *(out if inputs else none)[1:]

    def choose(flag: Flag, fun: Callable[[bool], Tree]) -> Tree:
        if flag is None or isinstance(flag, tuple):
            return fun(flag is None)
        return axes.cond(flag, lambda: fun(True), lambda: fun(False))

    def branched(cotangent: Tree) -> tuple[Tree, ...]:
        def given(x: bool) -> Tree:
            return choose(flags[1], functools.partial(gradients, cotangent, x))

        return choose(flags[0], given)

    def selected(cotangent: Tree) -> tuple[Tree, ...]:
        def keep(flag: Flag, out: Tree) -> Tree:
            is_kept = flag if isinstance(flag, jax.Array) else flag is None
            return jax.tree.map(lambda x: jnp.where(is_kept, x, jnp.zeros_like(x)), out)

        weights, *inputs = differentiable(cotangent)
        return keep(flags[0], weights), *keep(flags[1], inputs)

    if "conv_general_dilated" in str(jax.make_jaxpr(differentiable)(cotangent)):
        return run_on_cpu(selected, branched, cotangent)
    return branched(cotangent)
