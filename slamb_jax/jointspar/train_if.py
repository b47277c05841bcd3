"""A layer whose backward pass is computed only if the layer is to be trained."""

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from slamb_jax.jointspar.branches import Flag, train_function_if


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
    results of matrix products and convolutions are saved, the cheap ones computed
    again. Under ``jax.vmap`` over the flags both branches are computed. Forward-mode
    differentiation is not supported.

    Args:
      active: the result of :func:`active_layers`. None returns ``layer``, such as for
        evaluation.
      name: the layer's label in the optimizer.
      layer: a function ``layer(params, *inputs)``, which must not close over arrays
        that are to be differentiated; or a Flax linen module, called inside its
        parent's method; or a Flax nnx module.
      below: the labels of all layers from which ``inputs`` are computed, empty for
        none: if all are inactive, the backward pass ends here. None if something below
        is always trained, or if the gradient of the inputs is wanted for itself.

    Returns:
      A function as ``layer``, whose keyword arguments are not differentiated.

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

    """
    if not callable(layer):
        raise ValueError(f"layer must be a function or a Flax module, got {layer!r}")
    if active is None:
        return layer
    if not isinstance(active, Mapping):
        raise ValueError(f"active must be the result of active_layers, got {active!r}")
    for label in (name, *(below or ())):
        if label not in active:
            raise ValueError(
                f"there is no layer {label!r} in the optimizer, only "
                f"{', '.join(map(repr, active))}"
            )
    reached: Flag = None if below is None else ()
    if below:
        reached = functools.reduce(operator.or_, [active[x] for x in below])
    flags = active[name], reached
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
