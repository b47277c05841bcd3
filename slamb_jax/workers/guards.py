"""Checks of a step: of its arguments and results, on all workers and processes."""

import hashlib
import re
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from slamb_jax._core.axes import as_tuple
from slamb_jax._core.checks import shown
from slamb_jax.exchange.settings import Exchange
from slamb_jax.workers.agreement import checksums, differing_copies
from slamb_jax.workers.mesh import check_replicas, named_leaves

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Primitives that name an axis, but send nothing over it.
_LOCAL = ("axis_index", "pvary", "pcast", "pbroadcast")


def check_wrappers(state: chex.ArrayTree) -> None:
    """Raises, or warns, for a state of optax's wrappers that do not suit an exchange.

    One makes one worker skip a step, and the others wait; the other one exchanges at
    every mini-step.
    """

    def parts(tree: Any, is_part: Callable[[object], bool]) -> list[Any]:
        return list(filter(is_part, jax.tree.leaves(tree, is_leaf=is_part)))

    def has(wrapper: type, *modules: str) -> bool:
        wrapped = parts(state, lambda x: isinstance(x, wrapper))
        return bool(parts(wrapped, lambda x: type(x).__module__.startswith(modules)))

    if has(optax.ApplyIfFiniteState, "slamb_jax."):
        raise ValueError(
            "the state is of optax.apply_if_finite around an exchange: a worker that "
            "skips a step would leave the others waiting for ever. Take "
            "slamb_jax.skip_not_finite(tx, exchange)"
        )
    if has(optax.MultiStepsState, "slamb_jax.links.", "slamb_jax.jointspar."):
        warnings.warn(
            "the state is of optax.MultiSteps around an exchange: it exchanges at each "
            "mini-step, and drops the result of all but the last. Take "
            "slamb_jax.accumulate(tx, every), which exchanges once for the same step",
            UserWarning,
            stacklevel=3,  # who called replicate, or the init of on_workers
        )


def check_arguments(state: Any, batch: Any, n: int, devices: int) -> None:
    """Raises unless ``state`` is there n times and ``batch`` can be split."""
    for name, x in named_leaves("state", state).items():
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            raise ValueError(  # jaxlib may crash on it
                f"{name} was donated to an earlier step and is gone: go on with the "
                "state that the step returned, or keep a copy "
                "(jax.tree.map(jnp.copy, state)) before it"
            )
    check_replicas("state", state, n)
    scalars_only = not any(map(jnp.ndim, jax.tree.leaves(batch)))
    for name, x in named_leaves("batch", batch).items():
        shape = jnp.shape(x)  # a scalar beside arrays goes to all workers
        if shape[0] % devices if shape else scalars_only:
            raise ValueError(
                f"{name} must have a leading axis of a multiple of {devices}, got "
                f"shape {shape}"
            )


def check_result(out: Any, state: Any) -> tuple[Any, Any]:
    """What a step returned; raises unless it is a state like the old and a report."""
    wanted: Any = jax.tree.structure(state)
    is_pair = isinstance(out, tuple) and len(out) == 2
    if is_pair and jax.tree.structure(out[0]) == wanted:
        return out
    wrong = f"got {shown(out)}"
    if is_pair:
        wrong = f"the state of the structure that it got, {wanted}, got {out[0]}"
    raise ValueError(
        f"step must return a pair, the new state and a report, {wrong}: return state, "
        "None if there is nothing to report"
    )


def warn_if_alone(program: Any, axes: list[Hashable]) -> None:
    """Warns if a traced step has no collective over one of these axes of workers."""
    if alone := [axis for axis in axes if not _has_collective(program, axis)]:
        warnings.warn(
            "step changes most of the state and communicates nothing over "
            f"{', '.join(map(repr, alone))}: each worker along it trains by itself, on "
            "its share of the batch. Give the optimizer the exchange, slamb_jax.adamw("
            "rate, exchange) in place of optax.adamw; if this step is local on "
            "purpose, filter this warning",
            UserWarning,
            stacklevel=4,  # who called the step
        )


def _has_collective(program: Any, axis: Hashable) -> bool:
    for eqn in program.eqns:
        names = as_tuple(eqn.params.get("axes", eqn.params.get("axis_name")))
        if eqn.primitive.name not in _LOCAL and axis in names:
            return True
        called = jax.tree.leaves(list(eqn.params.values()))  # branches are in a tuple
        if any(hasattr(x, "eqns") and _has_collective(x, axis) for x in called):
            return True
    return False


def check_copies(state: Any, axes: tuple[Any, ...]) -> None:
    """Raises if the devices of a worker hold different copies of its state."""
    for name, x in named_leaves("state", state).items():
        if differing_copies(x):
            raise ValueError(
                f"{name} that step returned differs between the devices of a worker, "
                f"along {', '.join(map(repr, axes))}, where it must be the same: it "
                "depends on the device's own share of the batch, key or shard. Average "
                "it over the axis (slamb_jax.average_parameters for statistics; "
                "slamb_jax.average_gradients before slamb_jax.accumulate), give "
                "slamb_jax.skip_not_finite the same exchange, or report it instead."
            )


def check_same_values(tree: chex.ArrayTree) -> None:
    """Raises if processes gave :func:`replicate` different values."""
    named = named_leaves("tree", tree)
    leaves = list(named.values())
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    if jax.process_count() == 1 or not leaves or traced:
        return
    for name, sums in zip(named, checksums(leaves), strict=True):
        if (sums != sums[:1]).any():
            raise ValueError(
                f"{name} must be the same in all processes, and differs: begin with "
                "the same seed, or the same checkpoint, in each"
            )


def check_same_step(exchange: Exchange, traced: jax.stages.Traced, mesh: Mesh) -> None:
    """Raises if processes are about to run steps that are not the same.

    They would wait for each other for ever, or add up what does not belong together.
    A step that some of the processes run is not compared.
    """
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) == 1 or len(processes) < jax.process_count():
        return
    texts = _ADDRESS.sub("", repr(exchange)), traced.lower().as_text()
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    here = np.stack([np.frombuffer(digest, np.uint32) for digest in digests])
    everywhere = np.asarray(multihost_utils.process_allgather(here))
    exchanges_agree, steps_agree = (everywhere == everywhere[:1]).all((0, 2))
    if not exchanges_agree:
        raise ValueError(
            "exchange must be the same in all processes, and differs; here it is "
            f"{exchange!r}"
        )
    if not steps_agree:
        raise ValueError(
            "step must be the same program in all processes, and differs, though the "
            "exchange is the same: a rate, a seed, a size or a version is not"
        )
