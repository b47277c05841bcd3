"""A worker's step, as one program of all workers on a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._axes import tracked_axes, vary_over, worker_index
from slamb_jax._checks import check_apart, check_callable
from slamb_jax._replicas import (
    check_leading_sizes,
    is_key,
    like_key,
    put,
    workers_on,
)
from slamb_jax._same import check_same_state
from slamb_jax._shards import specs_of


def per_worker_step(
    step: Callable[..., tuple[Any, Any]],
    mesh: Mesh,
    axis_name: str,
    *,
    local_axis_name: str | None = None,
    param_specs: Any = None,
    check_vma: bool = True,
) -> Callable[..., tuple[Any, Any]]:
    """Turns a step as one worker sees it into a jitted step of all workers.

    Args:
      step: ``step(state, batch)`` or ``step(state, batch, key)``, returning the new
        state and what is to be reported. It sees one worker's state, one worker's
        share of the batch and that worker's own random key, and may use
        ``axis_name`` in collectives. It must take its gradient as if it were alone.
      mesh: the device mesh.
      axis_name: the mesh axis of the workers.
      local_axis_name: the mesh axis of the devices within a worker, if it is a group of
        several: the batch is split over both axes, each device has a key of its own and
        takes the gradient of its own share, and the state, one a group, is to come out
        the same on all devices of it, as it does from
        ``slamb(axis_name=..., local_axis_name=...)``.
      param_specs: as :func:`replicate` got them, for a model that does not fit on one
        device. ``step`` is written as if it did: how it computes on its shards is left
        to the compiler, and the state that it returns is cut as before.
      check_vma: as in ``jax.shard_map``. With True, gradients that were averaged
        behind the user's back are refused; False is for models whose kernels do not
        support the check.

    Returns:
      ``run(state, batch, key=None)``, jitted, with the ``lower`` of a jitted function.
      ``state`` is what :func:`replicate`
      returned, and is donated: use the one that comes back. The leaves of ``batch``
      have the workers' shares joined along their first axis. ``key`` is one random
      key, from which each worker gets its own. What ``step`` reports comes back with
      a leading axis of workers; nothing is exchanged for it.

    Raises:
      ValueError: if the mesh has no such axis; when called, if ``state`` was not
        replicated over it, a leaf of ``batch`` does not split evenly, or the new state
        might differ within a group.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> tx = slamb_jax.slamb(0.1, axis_name="data")
      >>> def step(state, batch):
      ...     params, opt_state = state
      ...     loss = lambda p: jnp.mean((batch @ p) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), value
      >>> params = jnp.ones(3)
      >>> state = slamb_jax.replicate((params, tx.init(params)), mesh, "data")
      >>> run = slamb_jax.per_worker_step(step, mesh, "data")
      >>> state, losses = run(state, jnp.ones((8, 3)))
      >>> print(losses)
      [9. 9. 9. 9.]

      A model in two halves, on each of four workers:

      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
      >>> specs = {"up": P(None, "model"), "down": P("model", None)}
      >>> tx = slamb_jax.slamb(0.1, axis_name="data", param_specs=specs)
      >>> params = {"up": jnp.ones((3, 8)), "down": jnp.ones((8, 3))}
      >>> start = (params, tx.init(params))
      >>> state = slamb_jax.replicate(start, mesh, "data", specs)
      >>> state[0]["up"].addressable_shards[0].data.shape
      (1, 3, 4)
      >>> run = slamb_jax.per_worker_step(step, mesh, "data", param_specs=specs)
    """
    check_callable("step", step)
    n = workers_on(mesh, axis_name)
    split, same = PartitionSpec(axis_name), PartitionSpec()
    axes = _axes_of_batch(mesh, axis_name, local_axis_name, param_specs)
    shares = n * mesh.shape[local_axis_name] if local_axis_name else n
    each = PartitionSpec(axes)

    def one_worker(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), state)
        keys = own_keys(key, axes)
        if local_axis_name is None:
            own, report = step(own, batch, *keys)
        else:
            own = _own_by_type(own, local_axis_name)
            own, report = check_same_state(step, own, (batch, *keys), local_axis_name)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), (own, report))

    if param_specs is not None:
        # Not in the types: it is the compiler's, who else gathers (jax 0.10).
        mesh = Mesh(mesh.devices, mesh.axis_names)
    workers = jax.shard_map(
        one_worker,
        mesh=mesh,
        in_specs=(split, each, same),
        out_specs=each,
        check_vma=check_vma,
        **({} if param_specs is None else {"axis_names": {axis_name}}),
    )

    def shardings(state: Any) -> Any:
        specs = specs_of(state, param_specs, mesh, axis_name, behind=1)
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, PartitionSpec(axis_name, *spec)), specs
        )

    def program(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        new, report = workers(state, batch, key)
        if local_axis_name is not None:
            new = _one_of_each_group(new, mesh, each, split)
        if param_specs is not None:
            new = jax.lax.with_sharding_constraint(new, shardings(new))
        return new, report

    jitted = jax.jit(program, donate_argnums=0)

    def placed(state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        check_leading(state, batch, n, shares)
        return (
            jax.tree.map(_place_one, state, shardings(state)),
            _place(batch, mesh, each),
            _place(key, mesh, same),
        )

    def run(state: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        return jitted(*placed(state, batch, key))

    def lower(state: Any, batch: Any, key: Any = None) -> jax.stages.Lowered:
        return jitted.lower(*placed(state, batch, key))

    run.lower = lower  # type: ignore[attr-defined]
    return run


def _axes_of_batch(
    mesh: Mesh, axis_name: str, local_axis_name: str | None, param_specs: Any
) -> Any:
    """The mesh axes over which the batch is split."""
    if local_axis_name is None:
        return axis_name
    if param_specs is not None:
        raise ValueError(
            "param_specs and local_axis_name cannot both be given here, got "
            f"{param_specs!r} and {local_axis_name!r}: use jax.shard_map over all "
            "axes of the mesh, where slamb takes both"
        )
    check_apart(axis_name, local_axis_name)
    workers_on(mesh, local_axis_name, "local_axis_name")
    return (axis_name, local_axis_name)


def _one_of_each_group(
    state: Any, mesh: Mesh, each: PartitionSpec, split: PartitionSpec
) -> Any:
    """The state of a group, which all its devices have, as was checked."""
    joined = jax.shard_map(
        lambda state: state,
        mesh=mesh,
        in_specs=each,
        out_specs=split,
        check_vma=False,
    )
    return joined(state)


def _own_by_type(state: Any, local_axis_name: str) -> Any:
    """The state, with a type that varies over the axis: else jax.grad would sum."""
    axes = tracked_axes(local_axis_name)

    def own(x: Any) -> Any:
        if is_key(x):
            return like_key(x, vary_over(jax.random.key_data(x), axes))
        return vary_over(x, axes)

    return jax.tree.map(own, state)


def own_keys(key: jax.Array | None, axis_name: Any) -> tuple[jax.Array, ...]:
    """The worker's own random key, as a step takes it: not at all without ``key``."""
    if key is None:
        return ()
    return (jax.random.fold_in(key, worker_index(axis_name)),)


def check_leading(state: Any, batch: Any, n: int, shares: int | None = None) -> None:
    """Raises unless ``state`` has n replicas and ``batch`` splits into n shares."""
    m = n if shares is None else shares
    check_leading_sizes("state", state, lambda size: size == n, f"{n} replicas")
    check_leading_sizes(
        "batch", batch, lambda size: size % m == 0, f"a multiple of {m}"
    )


def _place(tree: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    """Puts what is not there yet where the step expects it."""
    there = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: _place_one(x, there), tree)


def _place_one(x: Any, there: NamedSharding) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(there, x.ndim):
        return x
    return put(x, there)
