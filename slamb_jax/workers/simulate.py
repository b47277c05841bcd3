"""Many workers on one device: the same step, batched by ``jax.vmap``."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._tree.axes import AxisName, as_tuple
from slamb_jax._tree.checks import check_callable, check_integer
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.workers.step import Step, WorkersStep, check_leading, own_keys


def simulated_replicas(tree: chex.ArrayTree, workers: int) -> chex.ArrayTree:
    """Gives every simulated worker its own copy of ``tree``.

    The layout is that of :func:`replicate`, a leading replica axis on each leaf, on one
    device: for :func:`simulated_step`, and for :func:`consolidate` afterwards.

    Args:
      tree: parameters and optimizer state: a tree of arrays or numbers.
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


def simulated_step(step: Step, workers: int, exchange: Exchange) -> WorkersStep:
    """Makes a jitted step of n workers, simulated on one device, from that of one.

    Like :func:`per_worker_step`, for the same ``step``, with all workers on one device,
    in one ``jax.vmap`` over the exchange's ``axis_name``: to see what an optimizer does
    on more workers than there are devices. Results agree to rounding.

    Integer scalars of the state (step counts) that agree on all workers, and that
    ``step`` keeps so, are computed once, so a conditional on them stays one: the
    parameters are averaged only when that is due.

    Memory holds n states at once, and the activations of n gradients unless ``step``
    takes its gradient through :func:`in_chunks`.

    Args:
      step: ``step(state, batch)`` or ``step(state, batch, key)``, as for
        :func:`per_worker_step`; it returns a state of the structure that it got.
      workers: n, at least 1.
      exchange: that of the optimizer in ``step``, of single, unsharded devices: without
        ``local_axis_name`` and ``param_specs``.

    Returns:
      ``run(state, batch, key=None)``, jitted, with the ``lower`` of a jitted function.
      ``state`` is what :func:`simulated_replicas` returned, and is donated: use the
      one that comes back. The leaves of ``batch`` have the workers' shares joined
      along their first axis. ``key`` is one random key, from which each worker gets
      its own. The report comes back with a leading axis of workers.

    Raises:
      ValueError: for ``workers`` or ``exchange`` out of range; when called, if
        ``state`` has not n replicas, a leaf of ``batch`` does not split evenly, or
        ``step`` changes the structure of the state.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("data")
      >>> tx = slamb_jax.slamb(0.1, exchange)
      >>> def step(state, batch):
      ...     params, opt_state = state
      ...     loss = lambda p: jnp.mean((batch @ p) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), value
      >>> params = jnp.ones(3)
      >>> state = slamb_jax.simulated_replicas((params, tx.init(params)), 128)
      >>> run = slamb_jax.simulated_step(step, 128, exchange)
      >>> state, losses = run(state, jnp.ones((256, 3)))
      >>> print(losses.shape, losses[0])
      (128,) 9.0
    """
    check_callable("step", step)
    check_integer("workers", workers, 1)
    axis_name = _simulated_axis(exchange)
    jitted = jax.jit(
        functools.partial(_all_workers, step, workers, axis_name),
        donate_argnums=0,
        static_argnums=3,
    )
    last: dict[int, jax.Array] = {}  # the counts that the last call returned
    unlike: frozenset[int] = frozenset()  # those that differed between workers

    def run(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        nonlocal unlike
        check_leading(state, batch, workers, workers)
        counts = _counts(state)
        if any(last.get(i) is not x for i, x in counts.items()):
            unlike = frozenset(i for i, x in counts.items() if np.ptp(np.asarray(x)))
        state, report = jitted(state, batch, key, unlike)
        last.clear()
        last.update(_counts(state))
        return state, report

    def lower(state: Any, batch: Any, key: Any) -> jax.stages.Lowered:
        check_leading(state, batch, workers, workers)
        return jitted.lower(state, batch, key, frozenset())

    return WorkersStep(run, lower)


def _simulated_axis(exchange: Exchange) -> AxisName:
    """The one axis of an exchange between simulated workers."""
    check_exchange(exchange)
    for name in ("local_axis_name", "param_specs"):
        if (value := getattr(exchange, name)) is not None:
            raise ValueError(
                f"exchange must be without {name} where workers are simulated, each "
                f"being a single device, got {value!r}: give the optimizer and "
                f"simulated_step dataclasses.replace(exchange, {name}=None)"
            )
    if len(as_tuple(exchange.axis_name)) != 1:
        raise ValueError(
            "exchange must have one axis_name where workers are simulated, got "
            f"{exchange.axis_name!r}"
        )
    return as_tuple(exchange.axis_name)[0]


def _all_workers(
    step: Step,
    n: int,
    axis_name: AxisName,
    state: Any,
    batch: Any,
    key: Any,
    unlike: frozenset[int],
) -> tuple[Any, Any]:
    """One step of all workers; counts with the numbers ``unlike`` are batched."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(state)
    shares = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), batch)

    def one_worker(leaves: list[Any], batch: Any, key: Any) -> tuple[Any, Any]:
        keys = own_keys(key, axis_name)
        new, report = step(treedef.unflatten(leaves), batch, *keys)
        if jax.tree.structure(new) != treedef:
            raise ValueError(
                f"step must return a state of the structure it got, {treedef}, got "
                f"{jax.tree.structure(new)}"
            )
        return jax.tree.leaves(new), report

    def mapped(fun: Callable[..., Any], once: frozenset[int], out: Any) -> Any:
        axes = [None if i in once else 0 for i in range(len(leaves))]
        own = [x[0] if i in once else x for i, x in enumerate(leaves)]
        over = jax.vmap(
            fun, in_axes=(axes, 0, None), out_axes=out(axes), axis_name=axis_name
        )
        return over(own, shares, key)

    once = frozenset(i for i, x in enumerate(leaves) if _is_count(x)) - unlike
    while varying := _varying(one_worker, mapped, once):
        once -= varying
    new, report = mapped(one_worker, once, lambda axes: (axes, 0))
    for i in once:
        new[i] = jnp.broadcast_to(new[i], (n, *new[i].shape))
    return treedef.unflatten(new), report


def _is_count(x: Any) -> bool:
    """Whether a leaf with a leading replica axis is an integer scalar of each."""
    return len(x.shape) == 1 and jnp.issubdtype(x.dtype, jnp.integer)


def _counts(state: Any) -> dict[int, Any]:
    return {i: x for i, x in enumerate(jax.tree.leaves(state)) if _is_count(x)}


def _varying(
    one_worker: Callable[..., Any], mapped: Callable[..., Any], once: frozenset[int]
) -> frozenset[int]:
    """Which of the leaves that are to be computed once come out batched."""
    found: set[int] = set()

    def probed(*args: Any) -> list[Any]:
        new, _ = one_worker(*args)
        return [_probe(new[i], i, found) for i in sorted(once)]

    jax.eval_shape(lambda: mapped(probed, once, lambda axes: 0))
    return frozenset(found)


def _probe(x: jax.Array, i: int, found: set[int]) -> jax.Array:
    """``x``; adds i to ``found`` if it is batched, since then its rule is called."""
    identity = jax.custom_batching.custom_vmap(lambda x: x)

    @identity.def_vmap
    def rule(n: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
        del n, batched
        found.add(i)
        return x, True

    return identity(x)
