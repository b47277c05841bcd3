"""One program of all workers on a mesh, made of the step or the update of one."""

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._core import axes, checks
from slamb_jax._core.axes import AxisName, as_tuple
from slamb_jax._core.leaves import arrays_among
from slamb_jax.exchange.settings import Exchange
from slamb_jax.workers import guards
from slamb_jax.workers import mesh as meshes

Step = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(eq=False)
class WorkersStep:
    """The step of all workers: ``(state, batch, key=None) -> (state, report)``."""

    _jitted: Any
    _place: Callable[..., tuple[Any, ...]]  # checks and places the arguments
    _call: Step  # of what is placed
    _mesh: Mesh | None = None
    _returned: list[weakref.ref[Any]] = dataclasses.field(default_factory=list)

    def __call__(self, state: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        state, *others = self._place(state, batch, key)
        with meshes.using(self._mesh):
            state = self._unshared(state, others, batch, key)
            if any(isinstance(x, Tracer) for x in jax.tree.leaves((state, others))):
                return self._jitted(state, *others)
            state, report = self._call(state, *others)
        self._returned = list(map(weakref.ref, jax.tree.leaves(state)))
        return state, report

    def lower(self, state: Any, batch: Any, key: Any = None) -> jax.stages.Lowered:
        """The program, as ``jax.jit(fun).lower`` gives it; nothing is run."""
        with meshes.using(self._mesh):
            return self._jitted.lower(*self._place(state, batch, key))

    def _unshared(self, state: Any, *others: Any) -> Any:
        """The state, with a copy of what it, or one of ``others``, has a second time.

        Of one buffer that a call donates and uses twice jaxlib makes an error, and with
        several CPU devices a segmentation fault. A state has one where a user begins an
        average with ``state["ema"] = state["p"]``; no step returns one.

        To ask where an array lies takes 0.1 ms, if it is new and on many devices. Only
        arrays as large as one that the last step did not return are asked.
        """
        leaves, rest = jax.tree.leaves(state), jax.tree.leaves(others)
        pairs = itertools.zip_longest(leaves, self._returned[: len(leaves)])
        new = [x for x, known in pairs if known is None or known() is not x]
        sizes = {x.nbytes for x in filter(meshes.is_held, new + rest)}
        seen = set(map(_buffer, filter(meshes.is_held, rest)))

        def alone(x: Any) -> Any:
            if not meshes.is_held(x) or x.nbytes not in sizes:
                return x
            if (at := _buffer(x)) in seen:
                return meshes.on_raw(jnp.copy, x)
            seen.add(at)
            return x

        return jax.tree.map(alone, state)


def _buffer(x: jax.Array) -> int:
    """Where an array lies on the first device of this process."""
    try:
        return x.addressable_data(0).unsafe_buffer_pointer()
    except Exception:  # none of it is here, or its backend does not say
        return id(x)


def per_worker_step(
    step: Step, mesh: Mesh, exchange: Exchange, *, check_vma: bool = True
) -> WorkersStep:
    """Makes a jitted step of all workers from the step of one worker.

    Args:
      step: ``step(state, batch)`` or ``step(state, batch, key)`` of one worker's state,
        share of the batch and random key, to the new state and a report. It may use the
        exchange's axes in collectives; its gradient is that of a worker alone.
      mesh: the device mesh.
      exchange: that of the optimizer in ``step``. With ``local_axis_name`` each device
        of a group has its share of the batch, a key and a gradient, and the state must
        come out the same on all. With ``param_specs`` the state is sharded as
        :func:`replicate` shards it; ``step`` is written as if not.
      check_vma: as in ``jax.shard_map``. With True, gradients that were averaged
        already are refused; False is for models whose kernels do not support it.

    Returns:
      ``run(state, batch, key=None)``, with the ``lower`` of a jitted function. The
      ``state``, of :func:`replicate`, is donated: use the one that comes back. An array
      that is in it twice, or in ``batch`` too, is copied first. The leaves of ``batch``
      have the workers' shares joined along their first axis; a scalar goes to all. From
      ``key`` each worker gets its own. The report has a leading axis of workers (of
      devices, with groups).

    Raises:
      ValueError: if the mesh lacks an axis of the exchange; when called, if ``state``
        was not replicated, ``batch`` does not split evenly, or ``step`` does not return
        such a state and a report; before the first step, if processes have other
        programs; after it, if the devices of a group hold different states.

    Warns:
      UserWarning: where workers take the same step, after the first call and once again
        after 300, for leaves of ``state`` that began the same on all workers and no
        longer are, as those that ``optax.adamw`` steps, or the statistics of BatchNorm.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> exchange = slamb_jax.Exchange("data")
      >>> tx = slamb_jax.lamb(0.1, exchange)
      >>> def step(state, batch):
      ...     params, opt_state = state
      ...     loss = lambda p: jnp.mean((batch @ p) ** 2)
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), value
      >>> params = jnp.ones(3)
      >>> state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
      >>> run = slamb_jax.per_worker_step(step, mesh, exchange)
      >>> state, losses = run(state, jnp.ones((8, 3)))
      >>> print(losses)
      [9. 9. 9. 9.]
    """
    checks.check_value(callable(step), "step", "a function", step)
    n, mesh = meshes.workers_on(mesh, exchange)
    between, local = as_tuple(exchange.axis_name), as_tuple(exchange.local_axis_name)
    if exchange.param_specs is not None and local:
        raise ValueError(
            "param_specs and local_axis_name cannot both be given here, but under "
            f"jax.shard_map over all axes of the mesh, got {exchange!r}"
        )
    devices = n * math.prod(mesh.shape[a] for a in local)
    split = NamedSharding(mesh, PartitionSpec(between + local))
    everywhere = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(_program(step, mesh, exchange, check_vma), donate_argnums=0)

    def place(state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        guards.check_arguments(state, batch, n, devices)
        there = (
            meshes.state_shardings(state, mesh, exchange, lead=1),
            jax.tree.map(lambda x: split if jnp.ndim(x) else everywhere, batch),
            jax.tree.map(lambda _: everywhere, key),
        )
        return jax.tree.map(meshes.device_put_global, (state, batch, key), there)

    return WorkersStep(jitted, place, guards.Watch(jitted, mesh, exchange), mesh)


def _program(step: Step, mesh: Mesh, exchange: Exchange, check_vma: bool) -> Step:
    """The step of all workers, made from the step of one; not jitted yet."""
    between = as_tuple(exchange.axis_name)
    both = between + as_tuple(exchange.local_axis_name)
    one_worker = functools.partial(own_step, step, both)

    def program(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        of_device, of_all = PartitionSpec(both), PartitionSpec()
        of_batch = jax.tree.map(lambda x: of_device if jnp.ndim(x) else of_all, batch)
        specs = of_batch, of_all
        workers = over_workers(one_worker, mesh, exchange, specs, check_vma)
        new, report = workers(state, batch, key)
        if both != between:  # equal in a group: keep one of each
            new = jax.shard_map(
                lambda state: state,
                mesh=mesh,
                in_specs=of_device,
                out_specs=PartitionSpec(between),
                check_vma=False,
            )(new)
        if exchange.param_specs is not None:
            of_state = meshes.state_shardings(new, mesh, exchange, lead=1)
            new = jax.lax.with_sharding_constraint(new, of_state)
        return new, report

    return program


def own_step(
    step: Step, axis_name: AxisName, state: Any, batch: Any, key: Any
) -> tuple[Any, Any]:
    """One worker's step, with a key of its own if there is one; its result checked."""
    index = jax.lax.axis_index(axis_name)
    keys = () if key is None else (jax.random.fold_in(key, index),)
    return guards.check_result(step(state, batch, *keys), state)


def on_workers(
    tx: optax.GradientTransformation, mesh: Mesh, exchange: Exchange
) -> optax.GradientTransformationExtraArgs:
    """Updates the replica of every worker, for a trainer that jits its own step.

    Such a trainer updates in one ``jax.jit`` over global arrays, where no axis of
    workers is bound and XLA averages gradients by itself. Give it parameters of
    :func:`replicate`, and a loss that maps one worker's loss over their leading axis
    (``jax.vmap``, ``nnx.vmap``): gradients have that axis too, and XLA has nothing to
    average. They must be those of the sum of the workers' losses: before those of the
    mean put ``optax.scale(n)``. A step of your own needs no such loss under
    :func:`per_worker_step`.

    Args:
      tx: the transformation, of one worker. Random keys in its state are the same on
        all, as their steps must be.
      mesh: the device mesh.
      exchange: that of the optimizer in ``tx``; without ``local_axis_name``, since each
        device of a group would have a gradient of its own.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` over trees and a state whose
      leaves have a leading axis of n workers. Arrays among the extra arguments are the
      same for all workers.

    Raises:
      ValueError: if the mesh lacks an axis of the exchange, or the exchange has
        groups; in ``init`` and ``update``, for leaves without that leading axis.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> exchange = slamb_jax.Exchange("data")
      >>> tx = slamb_jax.on_workers(slamb_jax.sgd(0.125, exchange), mesh, exchange)
      >>> params = slamb_jax.replicate(jnp.ones(3), mesh, exchange)
      >>> state = tx.init(params)
      >>> loss = jax.vmap(lambda p, x: jnp.mean((x @ p) ** 2))
      >>> @jax.jit
      ... def step(params, state, x):  # (4, 2, 3): of each worker its own rows
      ...     grads = jax.grad(lambda p: loss(p, x).sum())(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params, state = step(params, state, jnp.ones((4, 2, 3)))
      >>> print(slamb_jax.consolidate(params))
      [0.25 0.25 0.25]
    """
    checks.check_transformation("tx", tx)
    n, mesh = meshes.workers_on(mesh, exchange)
    if exchange.local_axis_name is not None:
        raise ValueError(
            "local_axis_name must be None here, where each worker has one gradient, "
            f"got {exchange!r}: use slamb_jax.per_worker_step"
        )
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> optax.OptState:
        meshes.check_replicas("params", params, n)

        of_all = over_workers(tx.init, mesh, exchange, ())
        with meshes.using(mesh):
            like = jax.eval_shape(of_all, params)
            guards.check_wrappers(like, exchange)
            there = meshes.state_shardings(like, mesh, exchange, lead=1)
            leaves = jax.tree.leaves(params)
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
                return jax.tree.map(meshes.device_put_global, like, there)
            return jax.jit(of_all, out_shardings=there)(params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.check_params(params)
        for name, tree in (("updates", updates), ("state", state), ("params", params)):
            meshes.check_replicas(name, tree, n)
        arrays, others = arrays_among(extra_args)

        def of_one(trees: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
            return tx.update(*trees, **arrays, **others)

        of_all = over_workers(of_one, mesh, exchange, (PartitionSpec(),))
        with meshes.using(mesh):
            return of_all((updates, state, params), arrays)

    return optax.GradientTransformationExtraArgs(init, update)


def over_workers(
    fun: Callable[..., Any],
    mesh: Mesh,
    exchange: Exchange,
    specs: tuple[Any, ...],
    check_vma: bool = True,
) -> Callable[..., Any]:
    """Makes a function of all workers' replicas from one of a worker's own.

    The other arguments are sharded by ``specs``. Results get a leading axis of workers,
    or of devices in groups.
    """
    between, local = as_tuple(exchange.axis_name), as_tuple(exchange.local_axis_name)

    def one_worker(replicas: Any, *args: Any) -> Any:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), replicas)
        if local:  # of a type that varies in the group: else jax.grad would sum there
            vary = functools.partial(axes.vary_over, axes=axes.tracked_axes(local))
            own = jax.tree.map(functools.partial(meshes.on_raw, vary), own)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), fun(own, *args))

    # Axes that are not named are left to the compiler; none names all of the mesh.
    return jax.shard_map(
        one_worker,
        mesh=mesh,
        in_specs=(PartitionSpec(between), *specs),
        out_specs=PartitionSpec(between + local),
        check_vma=check_vma,
        axis_names=set(between) if exchange.param_specs is not None else set(),
    )
