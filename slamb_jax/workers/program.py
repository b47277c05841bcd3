"""The step of all workers as one program, made from the step of one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from slamb_jax._axes import (
    AxisName,
    as_tuple,
    step_of_workers,
    tracked_axes,
    vary_over,
    worker_index,
)
from slamb_jax._left_out import left_out, seen_by_averages
from slamb_jax.exchange import Exchange
from slamb_jax.workers.mesh import on_raw
from slamb_jax.workers.replicas import state_shardings

Step = Callable[..., tuple[Any, Any]]

# In jax's errors about types that vary over a mesh axis.
_TYPE_WORDS = ("pcast", "pvary", "manual_axis_type", "varying manual axes")
_TYPE_NOTE = (
    "slamb_jax.per_worker_step runs the step of one worker, over whose axis types are "
    "checked. If the model cannot satisfy the check, pass check_vma=False; a "
    "with_sharding_constraint over the workers' axis must go."
)


@dataclasses.dataclass
class Found:
    """What tracing the step of one worker tells."""

    apart: set[int] = dataclasses.field(default_factory=set)  # leaves no average gets
    trains: bool = False  # most of the state's numbers change


def program_of(
    step: Step, mesh: Mesh, exchange: Exchange, check_vma: bool, found: Found
) -> Step:
    """The step of all workers, not jitted yet; traced, it tells ``found``."""
    between, local = as_tuple(exchange.axis_name), as_tuple(exchange.local_axis_name)
    of_worker = PartitionSpec(exchange.axis_name)
    of_device = PartitionSpec(between + local)

    def one_worker(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), state)
        if local:  # a type that varies over the group, else jax.grad would sum over it
            vary = functools.partial(vary_over, axes=tracked_axes(local))
            own = jax.tree.map(functools.partial(on_raw, vary), own)
        try:
            with step_of_workers(between + local), seen_by_averages() as seen:
                new, report = step(own, batch, *own_keys(key, between + local))
        except Exception as error:
            if any(word in str(error) for word in _TYPE_WORDS):
                error.add_note(_TYPE_NOTE)
            raise
        before: Any = jax.tree.structure(own)
        if before == jax.tree.structure(new):
            found.apart.update(left_out(own, seen))
            found.trains |= _changes_most(own, new)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), (new, report))

    def workers(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        of_batch = jax.tree.map(
            lambda x: of_device if jnp.ndim(x) else PartitionSpec(), batch
        )
        return jax.shard_map(
            one_worker,
            mesh=mesh,
            in_specs=(of_worker, of_batch, PartitionSpec()),
            out_specs=of_device,
            check_vma=check_vma,
            **({} if exchange.param_specs is None else {"axis_names": set(between)}),
        )(state, batch, key)

    one_per_group = jax.shard_map(
        lambda state: state,
        mesh=mesh,
        in_specs=of_device,
        out_specs=of_worker,
        check_vma=False,
    )

    def program(state: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        new, report = workers(state, batch, key)
        if local:
            new = one_per_group(new)
        if exchange.param_specs is not None:
            there = state_shardings(new, mesh, exchange, behind=1)
            new = jax.lax.with_sharding_constraint(new, there)
        return new, report

    return program


def own_keys(key: jax.Array | None, axis_name: AxisName) -> tuple[jax.Array, ...]:
    """The arguments of a step behind the batch: its own key, if there is a key."""
    if key is None:
        return ()
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if key.ndim != (0 if typed else 1) or not (typed or key.dtype == jnp.uint32):
        raise ValueError(
            "key must be one random key, as jax.random.key(0) makes it, got "
            f"{key.dtype} of shape {key.shape}"
        )
    return (jax.random.fold_in(key, worker_index(axis_name)),)


def _changes_most(state: Any, new: Any) -> bool:
    """Whether a traced step gives most floating-point numbers of the state anew.

    An evaluation may add up metrics in its state, and hands the rest on.
    """
    pairs = zip(*map(jax.tree.leaves, (state, new)), strict=True)
    sizes = [
        (jnp.size(x), x is not y)
        for x, y in pairs
        if jnp.issubdtype(jnp.result_type(x), jnp.floating)
    ]
    changed = sum(size for size, anew in sizes if anew)
    return 2 * changed > sum(size for size, _ in sizes)
