"""Checks of a step: of its arguments and results, on all workers and processes."""

import hashlib
import re
import warnings
from collections.abc import Hashable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from slamb_jax._core.axes import as_tuple
from slamb_jax._core.checks import named_leaves
from slamb_jax.exchange.settings import Exchange
from slamb_jax.workers.agreement import checksums, differing_copies
from slamb_jax.workers.mesh import check_replicas, is_held

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Primitives that name an axis, but send nothing over it.
_LOCAL = ("axis_index", "pvary", "pcast", "pbroadcast")


def check_wrappers(state: chex.ArrayTree) -> None:
    """Raises, or warns, for a state of optax's wrappers that do not suit an exchange.

    One makes one worker skip a step, and the others wait; the other one exchanges at
    every mini-step.
    """
    if _is_around(state, "ApplyIfFiniteState", "slamb_jax."):
        raise ValueError(
            "the state is of optax.apply_if_finite around an exchange: a worker that "
            "skips a step would leave the others waiting for ever. Take "
            "slamb_jax.skip_not_finite(tx, exchange)"
        )
    links = "slamb_jax.links.", "slamb_jax.jointspar."
    if _is_around(state, "MultiStepsState", *links):
        warnings.warn(
            "the state is of optax.MultiSteps around an exchange: it exchanges at each "
            "mini-step, and drops the result of all but the last. Take "
            "slamb_jax.accumulate(tx, every), which exchanges once for the same step",
            stacklevel=3,  # who called replicate, or the init of on_workers
        )


def _is_around(state: Any, wrapper: str, *modules: str) -> bool:
    """Whether a state of this wrapper has one from these modules in it."""

    def is_of_modules(x: object) -> bool:
        return type(x).__module__.startswith(modules)

    wrapped = optax.tree.get_all_with_path(state, wrapper)
    return any(map(is_of_modules, jax.tree.leaves(wrapped, is_leaf=is_of_modules)))


def check_arguments(state: Any, batch: Any, n: int, devices: int) -> None:
    """Raises unless ``state`` is there n times and ``batch`` can be split."""
    for name, x in named_leaves("state", state).items():
        if is_held(x) and x.is_deleted():
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
    if not is_pair or jax.tree.structure(out[0]) != wanted:
        raise ValueError(
            "step must return a pair, the new state and a report, and that state of "
            f"the structure that it got, {wanted}, got {jax.tree.structure(out)}: "
            "return state, None if there is nothing to report"
        )
    return out


def check_program(
    traced: jax.stages.Traced, mesh: Mesh, exchange: Exchange, trains: bool
) -> None:
    """Looks at the program of all workers, once, before it runs.

    Warns if it ``trains`` and communicates nothing over an axis of workers. Raises if
    processes have programs that differ: they would wait for each other for ever, or add
    up what does not belong together.
    """
    used = _axes_communicated(traced.jaxpr) if trains else set(mesh.axis_names)
    shared = [a for a in as_tuple(exchange.axis_name) if mesh.shape[a] > 1]
    if alone := [axis for axis in shared if axis not in used]:
        warnings.warn(
            "step changes most of the state and communicates nothing over "
            f"{', '.join(map(repr, alone))}: each worker along it trains by itself, on "
            "its share of the batch. Give the optimizer the exchange, slamb_jax.adamw("
            "rate, exchange) in place of optax.adamw; if this step is local on "
            "purpose, filter this warning",
            stacklevel=4,  # who called the step
        )
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) == 1 or len(processes) < jax.process_count():
        return  # not all processes are here to compare
    for what, text in (
        ("exchange must be the same", _ADDRESS.sub("", repr(exchange))),
        ("step must be the same program", traced.lower().as_text()),
    ):
        digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
        digests = np.asarray(multihost_utils.process_allgather(digest))
        way_out = f", here with {exchange!r}: a rate, seed, size or version is not"
        _check_same(what, digests, way_out)


def _axes_communicated(program: Any) -> set[Hashable]:
    """The axes over which a jaxpr has collectives."""
    axes: set[Hashable] = set()
    for eqn in program.eqns:
        if eqn.primitive.name not in _LOCAL:
            named = eqn.params.get("axes", eqn.params.get("axis_name"))
            axes.update(as_tuple(named))
        called = jax.tree.leaves(list(eqn.params.values()))  # branches are in a tuple
        axes.update(*(_axes_communicated(x) for x in called if hasattr(x, "eqns")))
    return axes


def check_same_values(tree: chex.ArrayTree) -> None:
    """Raises if processes gave :func:`replicate` different values."""
    named = named_leaves("tree", tree)
    leaves = list(named.values())
    if jax.process_count() == 1 or not leaves or not all(map(is_held, leaves)):
        return
    way_out = ": begin with the same seed, or the same checkpoint, in each"
    for name, sums in zip(named, checksums(leaves), strict=True):
        _check_same(f"{name} must be the same", sums, way_out)


def _check_same(what: str, sums: np.ndarray, way_out: str) -> None:
    if (sums != sums[:1]).any():
        raise ValueError(f"{what} in all processes, and differs{way_out}")


def check_copies(state: Any, axes: tuple[Hashable, ...]) -> None:
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
