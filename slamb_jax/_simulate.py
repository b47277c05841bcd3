"""Many workers on one device: the same step, batched instead of spread."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._checks import check_callable, check_integer
from slamb_jax._worker_step import check_leading, own_keys


def simulated_replicas(tree: chex.ArrayTree, workers: int) -> chex.ArrayTree:
    """Gives every simulated worker its own copy of ``tree``, all the same.

    The layout is that of :func:`replicate`, a leading replica axis on each leaf, but on
    one device: for :func:`simulated_step`, and for :func:`consolidate` afterwards.

    Args:
      tree: parameters, optimizer state, random keys: a tree of arrays (or numbers).
      workers: n, at least 1.

    Returns:
      A tree like ``tree`` of arrays of shape ``(n, ...)``.

    Raises:
      ValueError: for ``workers`` out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> slamb_jax.simulated_replicas({"w": jnp.ones(3)}, 128)["w"].shape
      (128, 3)
    """
    check_integer("workers", workers, 1)

    def copies(x: Any) -> jax.Array:
        one = jnp.asarray(x, jnp.result_type(x))
        return jnp.broadcast_to(one, (workers, *one.shape))

    return jax.tree.map(copies, tree)


def simulated_step(
    step: Callable[..., tuple[Any, Any]], workers: int, axis_name: str
) -> Callable[..., tuple[Any, Any]]:
    """Turns a step as one worker sees it into a jitted step of n simulated workers.

    As :func:`per_worker_step`, for the same ``step``, but all workers live on one
    device, as one ``jax.vmap`` over ``axis_name``: to see what an optimizer does on
    more workers than there are devices. Results agree to rounding.

    Integer scalars of the state (step counts) that agree on all workers, and that
    ``step`` keeps so, are computed once. A conditional on them stays one: the
    parameters are averaged only when that is due.

    Memory holds n states at once, and what computing n gradients takes, unless
    ``step`` takes its gradient through :func:`in_chunks`.

    Args:
      step: ``step(state, batch)`` or ``step(state, batch, key)``, as for
        :func:`per_worker_step`; the state it returns has the structure of the one it
        got.
      workers: n, at least 1.
      axis_name: the name over which ``step`` exchanges.

    Returns:
      ``run(state, batch, key=None)``, jitted, with the ``lower`` of a jitted function.
      ``state`` is what :func:`simulated_replicas` returned, and is donated: use the
      one that comes back. The leaves of ``batch`` have the workers' shares joined
      along their first axis. ``key`` is one random key, from which each worker gets
      its own. What ``step`` reports comes back with a leading axis of workers.

    Raises:
      ValueError: for ``workers`` out of range; when called, if ``state`` has not n
        replicas, a leaf of ``batch`` does not split evenly, or ``step`` changes the
        structure of the state.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> tx = slamb_jax.slamb(0.1, axis_name="data")
      >>> def step(state, batch):
      ...     params, opt_state = state
      ...     loss = lambda p: jnp.mean((batch @ p) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), value
      >>> params = jnp.ones(3)
      >>> state = slamb_jax.simulated_replicas((params, tx.init(params)), 128)
      >>> run = slamb_jax.simulated_step(step, 128, "data")
      >>> state, losses = run(state, jnp.ones((256, 3)))
      >>> print(losses.shape, losses[0])
      (128,) 9.0
    """
    check_callable("step", step)
    check_integer("workers", workers, 1)
    n = workers

    def all_workers(
        state: Any, batch: Any, key: Any, apart: frozenset[int]
    ) -> tuple[Any, Any]:
        treedef: Any
        leaves, treedef = jax.tree.flatten(state)
        shares = jax.tree.map(
            lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch
        )

        def one_worker(leaves: list[Any], batch: Any, key: Any) -> tuple[Any, Any]:
            keys = own_keys(key, axis_name)
            new, report = step(treedef.unflatten(leaves), batch, *keys)
            if jax.tree.structure(new) != treedef:
                raise ValueError(
                    "step must return a state of the structure it got, "
                    f"{treedef}, got {jax.tree.structure(new)}"
                )
            return jax.tree.leaves(new), report

        def mapped(fun: Callable[..., Any], once: frozenset[int], out: Any) -> Any:
            axes = [None if i in once else 0 for i in range(len(leaves))]
            own = [x[0] if i in once else x for i, x in enumerate(leaves)]
            over = jax.vmap(
                fun, in_axes=(axes, 0, None), out_axes=out(axes), axis_name=axis_name
            )
            return over(own, shares, key)

        once = frozenset(i for i, x in enumerate(leaves) if _is_count(x)) - apart
        while varying := _varying(one_worker, mapped, once):
            once -= varying
        new, report = mapped(one_worker, once, lambda axes: (axes, 0))
        spread = [
            jnp.broadcast_to(x, (n, *x.shape)) if i in once else x
            for i, x in enumerate(new)
        ]
        return treedef.unflatten(spread), report

    jitted = jax.jit(all_workers, donate_argnums=0, static_argnums=3)
    known: dict[int, jax.Array] = {}  # the counts that the last call returned
    apart: frozenset[int] = frozenset()  # those that were handed in unlike

    def run(state: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        nonlocal apart
        check_leading(state, batch, n)
        counts = _counts(state)
        if any(known.get(i) is not x for i, x in counts.items()):
            unlike = (i for i, x in counts.items() if np.ptp(np.asarray(x)) != 0)
            apart = frozenset(unlike)
        state, report = jitted(state, batch, key, apart)
        known.clear()
        known.update(_counts(state))
        return state, report

    def lower(state: Any, batch: Any, key: Any = None) -> jax.stages.Lowered:
        check_leading(state, batch, n)
        return jitted.lower(state, batch, key, frozenset())

    run.lower = lower  # type: ignore[attr-defined]
    return run


def in_chunks(fun: Callable[..., Any], size: int) -> Callable[..., Any]:
    """``fun``, computed for ``size`` workers at a time where many are simulated.

    For the gradient in a ``step`` that :func:`simulated_step` runs: the memory that
    activations take is that of ``size`` workers, not of all; and on a CPU, whose caches
    are small, few at a time are often faster. Where nothing is batched by ``jax.vmap``,
    under :func:`per_worker_step` say, it changes nothing.

    Args:
      fun: a function of arrays that exchanges nothing, such as
        ``jax.value_and_grad(loss)``; it may close over the worker's own arrays. It is
        not to be differentiated in reverse again.
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
            treedef: Any
            values, treedef = jax.tree.flatten((consts, leaves))
            own = [bool(b) for b in jax.tree.leaves(batched)]

            def one(mine: list[Any]) -> list[Any]:
                rest = iter(mine)
                joined = [
                    next(rest) if b else x for x, b in zip(values, own, strict=True)
                ]
                return flat(*treedef.unflatten(joined))

            mine = [x for x, b in zip(values, own, strict=True) if b]
            out = jax.lax.map(one, mine, batch_size=size)
            return out, jax.tree.map(lambda _: True, out)

        out = call(jaxpr.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return chunked


def _is_count(x: Any) -> bool:
    """Whether a leaf with a leading replica axis is an integer scalar of each."""
    return len(x.shape) == 1 and jnp.issubdtype(x.dtype, jnp.integer)


def _counts(state: Any) -> dict[int, Any]:
    return {i: x for i, x in enumerate(jax.tree.leaves(state)) if _is_count(x)}


def _varying(
    one_worker: Callable[..., Any], mapped: Callable[..., Any], once: frozenset[int]
) -> frozenset[int]:
    """Which of the leaves that are to be computed once come out different."""
    found: set[int] = set()

    def probed(*args: Any) -> list[Any]:
        new, _ = one_worker(*args)
        return [_probe(new[i], i, found) for i in sorted(once)]

    jax.eval_shape(lambda: mapped(probed, once, lambda axes: 0))
    return frozenset(found)


def _probe(x: jax.Array, i: int, found: set[int]) -> jax.Array:
    """``x``; adds i to ``found`` if it is batched, for then its rule is asked."""
    identity = jax.custom_batching.custom_vmap(lambda x: x)

    @identity.def_vmap
    def rule(n: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        del n, batched
        found.add(i)
        return x, True

    return identity(x)
