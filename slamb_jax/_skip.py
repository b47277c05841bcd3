"""A layer whose backward pass branches on whether it is to be trained."""

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from slamb_jax import _axes
from slamb_jax._convolutions import with_ordered_convolutions

Vjp = Callable[..., tuple[Any, Any]]
Flag = jax.Array | tuple[()] | None  # traced; never; always
_KEPT = ("dot_general", "conv_general_dilated", "random_bits", "random_wrap")


def train_if(
    active: Mapping[str, jax.Array] | None,
    name: str,
    layer: Callable[..., Any],
    *,
    below: Sequence[str] | None = None,
) -> Callable[..., Any]:
    r"""The same layer, whose weight gradient is computed only if it is active.

    With :math:`y = f(w, x)` and the cotangent :math:`\bar y` of its output,

    .. math::

      \bar w = \begin{cases}
        \bar y\,\partial f / \partial w & \text{the layer is active} \\
        0 & \text{otherwise}
      \end{cases} \qquad
      \bar x = \begin{cases}
        \bar y\,\partial f / \partial x & \text{a layer of \texttt{below} is active} \\
        0 & \text{otherwise}
      \end{cases}

    in real branches (``lax.cond``) of the backward pass: what is 0 is not computed.
    The forward pass is that of ``layer``; of its results those of products and
    convolutions are kept, and the cheap ones computed again. It works under
    ``jit``, ``shard_map`` and ``pmap``; under ``jax.vmap`` with flags of each one's own
    the numbers are right, but both sides of a branch are computed: it is not faster.
    ``jax.checkpoint`` may be inside or outside. There is no
    forward-mode differentiation.

    Args:
      active: what :func:`active_layers` returned. None gives ``layer`` back, to
        evaluate it, say.
      name: the layer's label in the optimizer.
      layer: a function ``layer(params, *inputs)``; or a Flax linen module, called
        inside its parent's method; or a Flax nnx module. It must not close over
        arrays that are to be differentiated.
      below: the labels of all layers from which ``inputs`` are computed, empty for
        none: where they are all inactive, the backward pass ends here. None if
        something below is always trained, or if the gradient with respect to the
        inputs is wanted for itself.

    Returns:
      A function with the arguments and results of ``layer``. Keyword arguments are
      not differentiated.

    Raises:
      ValueError: for a name that is none of the optimizer's layers, and for a
        ``layer`` that cannot be called.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> dense = lambda w, x: jnp.tanh(x @ w)
      >>> def loss(params, active):
      ...     x = jnp.ones((2, 3))
      ...     x = slamb_jax.train_if(active, "a", dense, below=())(params["a"], x)
      ...     x = slamb_jax.train_if(active, "b", dense, below=("a",))(params["b"], x)
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
    # Without importing Flax where nobody has.
    if (linen := sys.modules.get("flax.linen")) and isinstance(layer, linen.Module):
        from slamb_jax._skip_flax import train_linen_if

        return train_linen_if(flags, layer)
    if (nnx := sys.modules.get("flax.nnx")) and isinstance(layer, nnx.Module):
        from slamb_jax._skip_flax import train_nnx_if

        return train_nnx_if(flags, layer)
    return lambda params, *inputs, **settings: train_function_if(
        flags, lambda *args: layer(*args, **settings), params, inputs
    )


def train_function_if(
    flags: tuple[Flag, Flag], fun: Callable[..., Any], params: Any, inputs: Any
) -> Any:
    """``fun(params, *inputs)``; the flags say which of the two gradients to compute."""
    weights, join = floating((params, inputs))

    def call(trained: Any, rest: Any) -> Any:
        params, inputs = join(trained, rest)
        return fun(params, *inputs)

    own, others = weights
    of_params = len(floating(params)[0][0])

    @jax.custom_vjp
    def branching(flags: Any, own: Any, others: Any) -> Any:
        return call(own, others)

    kept = jax.checkpoint(call, policy=is_kept, prevent_cse=False)

    def forward(flags: Any, own: Any, others: Any) -> tuple[Any, Any]:
        y, vjp = jax.vjp(
            lambda params, inputs: kept([*params, *inputs], others),
            own[:of_params],
            own[of_params:],
        )
        return y, (flags, vjp)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        flags, vjp = residuals
        params, inputs = pulled_back(flags, vjp, cotangent)
        return None, [*params, *inputs], None

    branching.defvjp(forward, backward)
    return branching(flags, own, others)


def is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether the backward pass finds a result in memory; the others it computes anew.

    What crosses into a branch must lie in memory, where without branches XLA fuses
    most of it away: to keep every intermediate result costs more than a skip saves.
    """
    return primitive.name in _KEPT


def pulled_back(flags: tuple[Flag, Flag], vjp: Vjp, cotangent: Any) -> tuple[Any, Any]:
    """The two cotangents that ``vjp`` gives, each computed if its flag says so."""
    shapes = jax.eval_shape(vjp, cotangent)
    in_branch = with_ordered_convolutions(vjp)

    def only(params: bool, inputs: bool) -> Callable[[], tuple[Any, Any]]:
        def branch() -> tuple[Any, Any]:
            found = in_branch(cotangent) if params or inputs else (None, None)
            zeros = jax.tree.map(_zeros, shapes)
            return found[0] if params else zeros[0], found[1] if inputs else zeros[1]

        return branch

    def on(flag: Flag, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        if flag is None or isinstance(flag, tuple):
            return yes() if flag is None else no()
        return _axes.cond(flag, yes, no)

    own, below = flags
    return on(
        own,
        lambda: on(below, only(True, True), only(True, False)),
        lambda: on(below, only(False, True), only(False, False)),
    )


def floating(tree: Any) -> tuple[tuple[list[Any], list[Any]], Callable[..., Any]]:
    """The leaves that can be differentiated, the others, and what joins them again."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    is_floating = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]

    def join(own: Any, others: Any) -> Any:
        sources = iter(own), iter(others)
        return treedef.unflatten([next(sources[not f]) for f in is_floating])

    own = [x for x, f in zip(leaves, is_floating, strict=True) if f]
    others = [x for x, f in zip(leaves, is_floating, strict=True) if not f]
    return (own, others), join


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    zeros = jnp.zeros(like.shape, like.dtype)
    return _axes.vary_over(zeros, _axes.varying_axes(like))


def _any(active: Mapping[str, jax.Array], names: Sequence[str]) -> Flag:
    if not names:
        return ()
    return functools.reduce(operator.or_, (active[name] for name in names))


def _check_names(active: Mapping[str, jax.Array], names: Sequence[str]) -> None:
    if not isinstance(active, Mapping):
        raise ValueError(
            f"active must be what slamb_jax.active_layers returned, got {active!r}"
        )
    for name in names:
        if name not in active:
            raise ValueError(
                f"there is no layer {name!r} in the optimizer, which has "
                f"{', '.join(map(repr, active))}"
            )
