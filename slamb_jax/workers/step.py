"""A worker's step, as one program of all workers on a mesh."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._axes import as_tuple
from slamb_jax._checks import check_callable
from slamb_jax._layout import mesh_axes
from slamb_jax.exchange import Exchange
from slamb_jax.workers.drift import check_copies, check_together, warn_if_alone
from slamb_jax.workers.mesh import (
    auto_mesh,
    device_put_global,
    indexable_mesh,
    mesh_sharding,
    workers_on,
)
from slamb_jax.workers.processes import check_same_step
from slamb_jax.workers.program import Found, Step, program_of
from slamb_jax.workers.replicas import check_leading_sizes, state_shardings


@dataclasses.dataclass(frozen=True)
class WorkersStep:
    """The step of all workers: ``(state, batch, key=None) -> (state, report)``."""

    _run: Step
    _lower: Callable[..., jax.stages.Lowered]

    def __call__(self, state: Any, batch: Any, key: Any = None) -> tuple[Any, Any]:
        return self._run(state, batch, key)

    def lower(self, state: Any, batch: Any, key: Any = None) -> jax.stages.Lowered:
        """The program, as ``jax.jit(fun).lower`` gives it; nothing is run."""
        return self._lower(state, batch, key)


def per_worker_step(
    step: Step, mesh: Mesh, exchange: Exchange, *, check_vma: bool = True
) -> WorkersStep:
    """Makes a jitted step of all workers from the step of one worker.

    Args:
      step: ``step(state, batch)`` or ``step(state, batch, key)``, returning the new
        state and a report: of one worker's state, share of the batch and random key.
        It may use the exchange's axes in collectives, and must take its gradient as if
        it were alone.
      mesh: the device mesh.
      exchange: that of the optimizer in ``step``. With ``local_axis_name`` a worker is
        a group of devices: the batch is split over both axes, each device has a key of
        its own and takes the gradient of its own share, and the state must come out
        the same on all devices of the group, as it does from :func:`slamb`. With
        ``param_specs`` the state is sharded as :func:`replicate` has it; ``step`` is
        written as if it were not, and how it computes is left to the compiler.
      check_vma: as in ``jax.shard_map``. With True, gradients that were averaged
        already are refused; False is for models whose kernels do not support it.

    Returns:
      ``run(state, batch, key=None)``, jitted, with the ``lower`` of a jitted function.
      ``state`` is what :func:`replicate` returned, and is donated: use the one that
      comes back. The leaves of ``batch`` have the workers' shares joined along their
      first axis; a scalar goes to all workers. ``key`` is one random key, from which
      each worker gets its own. The report comes back with a leading axis of workers (of
      devices, with groups).

    Raises:
      ValueError: if the mesh lacks an axis of the exchange; when called, if ``state``
        was not replicated over it or a leaf of ``batch`` does not split evenly; before
        the first step, on all processes, if their programs or exchanges differ; after
        the first call, if the devices of a worker hold different copies of its state;
        after calls 1, 2, 4, 8, ..., if parameters that an average of this library
        leaves to another optimizer differ between workers.

    Warns:
      UserWarning: at the first call, if ``step`` changes most of the state and
        communicates nothing between the workers, as with ``optax.adamw``.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> exchange = slamb_jax.Exchange("data")
      >>> tx = slamb_jax.slamb(0.1, exchange)
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
    check_callable("step", step)
    n = workers_on(mesh, exchange)
    if exchange.param_specs is not None and exchange.local_axis_name is not None:
        raise ValueError(
            "param_specs and local_axis_name cannot both be given here, got "
            f"{exchange!r}: use jax.shard_map over all axes of the mesh, where "
            "slamb takes both"
        )
    mesh = indexable_mesh(mesh)
    if exchange.param_specs is not None:
        mesh = auto_mesh(mesh)  # with Explicit axes jax 0.10 gathers
    local = as_tuple(exchange.local_axis_name)
    devices = n * math.prod(mesh.shape[a] for a in local)
    split = NamedSharding(mesh, PartitionSpec(as_tuple(exchange.axis_name) + local))
    everywhere = NamedSharding(mesh, PartitionSpec())
    found = Found()
    program = program_of(step, mesh, exchange, check_vma, found)
    jitted = jax.jit(program, donate_argnums=0)

    def placed(state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        check_leading(state, batch, n, devices)
        shardings = state_shardings(state, mesh, exchange, behind=1)
        return (
            jax.tree.map(_place, state, shardings),
            jax.tree.map(
                lambda x: _place(x, split if jnp.ndim(x) else everywhere), batch
            ),
            jax.tree.map(lambda x: _place(x, everywhere), key),
        )

    within = local + mesh_axes(exchange.param_specs)
    calls = 0

    def before_the_first(*args: Any) -> None:
        traced = jitted.trace(*args)  # once: jax keeps it for the call
        if found.trains and n > 1:
            warn_if_alone(traced.jaxpr, as_tuple(exchange.axis_name))
        if jax.process_count() > 1:
            check_same_step(exchange, traced.lower(), mesh)

    def run(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        nonlocal calls
        args = placed(state, batch, key)
        if any(map(_is_traced, jax.tree.leaves(args))):
            out: tuple[Any, Any] = jitted(*args)
            return out
        if not calls:
            before_the_first(*args)
        state, report = jitted(*args)
        if within and not calls:
            check_copies(state, within)
        calls += 1
        if found.apart and calls & (calls - 1) == 0:  # seldom: a rate may begin with 0
            check_together(state, found.apart)
        return state, report

    return WorkersStep(run, lambda *args: jitted.lower(*placed(*args)))


def check_leading(state: Any, batch: Any, n: int, devices: int) -> None:
    """Raises unless ``state`` is there n times and ``batch`` can be split."""
    if any(map(_is_gone, jax.tree.leaves(state))):  # jaxlib may crash on it
        flat = jax.tree_util.tree_leaves_with_path(state)
        path = next(path for path, x in flat if _is_gone(x))
        raise ValueError(
            f"state{jax.tree_util.keystr(path)} was donated to an earlier step and "
            "is gone: go on with the state that the step returned, or keep a copy "
            "(jax.tree.map(jnp.copy, state)) before it"
        )
    check_leading_sizes("state", state, lambda size: size == n, f"{n} replicas")
    for path, x in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_listed):
        if _is_listed(x):
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} must be an array, got a list of "
                f"{len(x)} numbers"
            )
    expected = f"a multiple of {devices}"
    if any(map(jnp.ndim, jax.tree.leaves(batch))):  # scalars beside them need no split
        batch = jax.tree.map(lambda x: x if jnp.ndim(x) else None, batch)
    check_leading_sizes("batch", batch, lambda size: size % devices == 0, expected)


def _is_listed(x: object) -> bool:
    return isinstance(x, list) and any(isinstance(y, int | float) for y in x)


def _is_traced(x: object) -> bool:
    return isinstance(x, jax.core.Tracer)


def _is_gone(x: object) -> bool:
    return isinstance(x, jax.Array) and not _is_traced(x) and x.is_deleted()


def _place(x: Any, there: NamedSharding) -> Any:
    """``x`` where the step expects it, if it is not there yet."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
    own = None if _is_traced(x) else mesh_sharding(x)
    if own and own.mesh == there.mesh and own.is_equivalent_to(there, x.ndim):
        return x
    return device_put_global(x, there)
