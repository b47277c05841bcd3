"""Gradients of simulated workers, a few workers at a time."""

from collections.abc import Callable
from typing import Any

import jax

from slamb_jax._tree.checks import check_callable, check_integer


def in_chunks(fun: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Computes ``fun`` for ``size`` workers at a time where many are simulated.

    For the gradient in a step that :func:`simulated_step` runs: activations then take
    the memory of ``size`` workers, not of all; and on a CPU, whose caches are small, a
    few at a time are often faster. Where nothing is batched by ``jax.vmap``, as under
    :func:`per_worker_step`, it changes nothing.

    Args:
      fun: a function of arrays without collectives, such as
        ``jax.value_and_grad(loss)``; it may close over the worker's own arrays. It
        must not be differentiated again in reverse mode.
      size: workers at a time, at least 1.

    Returns:
      A function that returns what ``fun`` returns.

    Raises:
      ValueError: for ``size`` out of range.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> square = slamb_jax.in_chunks(jax.grad(lambda x: jnp.sum(x**2)), 2)
      >>> print(jax.vmap(square)(jnp.arange(5.0)))
      [0. 2. 4. 6. 8.]
    """
    check_callable("fun", fun)
    check_integer("size", size, 1)

    def chunked(*args: Any) -> Any:
        # As a jaxpr, so that what fun closes over is batched like its arguments.
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)

        def flat(consts: list[Any], leaves: list[Any]) -> list[Any]:
            return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *leaves)

        call = jax.custom_batching.custom_vmap(flat)

        @call.def_vmap
        def rule(
            n: int, batched: Any, consts: list[Any], leaves: list[Any]
        ) -> tuple[Any, Any]:
            del n
            out = _mapped(flat, size, batched, (consts, leaves))
            return out, jax.tree.map(lambda _: True, out)

        out = call(jaxpr.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return chunked


def _mapped(
    fun: Callable[..., list[Any]], size: int, batched: Any, args: tuple[Any, ...]
) -> list[Any]:
    """``fun`` of arguments of which some have a leading axis of workers."""
    treedef: Any
    values, treedef = jax.tree.flatten(args)
    own = [bool(b) for b in jax.tree.leaves(batched)]

    def of_one(mine: list[Any]) -> list[Any]:
        rest = iter(mine)
        joined = [next(rest) if b else x for x, b in zip(values, own, strict=True)]
        return fun(*treedef.unflatten(joined))

    mine = [x for x, b in zip(values, own, strict=True) if b]
    return jax.lax.map(of_one, mine, batch_size=size)
