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
from slamb_jax._core.checks import shown
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links.average_parameters import AverageParametersState
from slamb_jax.links.mask_momentum import MaskMomentumState
from slamb_jax.workers.agreement import checksums, differing_copies
from slamb_jax.workers.mesh import check_replicas

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Primitives that name an axis, but send nothing over it.
_LOCAL = ("axis_index", "pvary", "pcast", "pbroadcast")


def check_arguments(state: Any, batch: Any, n: int, devices: int) -> None:
    """Raises unless ``state`` is there n times and ``batch`` can be split."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        traced = isinstance(x, jax.core.Tracer)
        if isinstance(x, jax.Array) and not traced and x.is_deleted():
            raise ValueError(  # jaxlib may crash on it
                f"state{jax.tree_util.keystr(path)} was donated to an earlier step and "
                "is gone: go on with the state that the step returned, or keep a copy "
                "(jax.tree.map(jnp.copy, state)) before it"
            )
    check_replicas("state", state, n)
    scalars_only = not any(map(jnp.ndim, jax.tree.leaves(batch)))
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(x)  # a scalar beside arrays goes to all workers
        if shape[0] % devices if shape else scalars_only:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)} must have a leading axis of a "
                f"multiple of {devices}, got shape {shape}"
            )


def check_result(out: Any, state: Any) -> tuple[Any, Any]:
    """What a step returned; raises unless it is a state like the old and a report."""
    wanted: Any = jax.tree.structure(state)
    if not isinstance(out, tuple) or len(out) != 2:
        wrong = f"got {shown(out)}"
    elif jax.tree.structure(out[0]) != wanted:
        wrong = f"the state of the structure that it got, {wanted}, got {out[0]}"
    else:
        return out
    raise ValueError(
        f"step must return a pair, the new state and a report, {wrong}: return state, "
        "None if there is nothing to report"
    )


def warn_if_alone(program: Any, axes: tuple[Hashable, ...]) -> None:
    """Warns if a traced step has no collective over the axes of the workers."""
    if not _has_collective(program, set(axes)):
        warnings.warn(
            "step changes most of the state and communicates nothing over "
            f"{', '.join(map(repr, axes))}: each worker trains by itself, on its share "
            "of the batch. Give the optimizer the exchange, slamb_jax.adamw(rate, "
            "exchange) in place of optax.adamw; if this step is local on purpose, "
            "filter this warning",
            UserWarning,
            stacklevel=4,  # who called the step
        )


def warn_of_another(exchange: Exchange, in_step: list[Exchange]) -> None:
    """Warns if no exchange in a traced step sends as that of its workers says.

    Their axes need not be equal: ``average_gradients`` may come before, for a group.
    """

    def how(x: Exchange) -> tuple[Any, ...]:
        return x.payload, x.sync_every, x.outer, x.overlap, x.selection

    if in_step and how(exchange) not in map(how, in_step):
        warnings.warn(
            f"step exchanges by {in_step[0]!r}, that of its optimizer, and not by the "
            f"exchange of slamb_jax.per_worker_step, {exchange!r}: give both the same",
            UserWarning,
            stacklevel=4,  # who called the step
        )


def _has_collective(program: Any, axes: set[Hashable]) -> bool:
    for eqn in program.eqns:
        names = eqn.params.get("axes", eqn.params.get("axis_name"))
        if eqn.primitive.name not in _LOCAL and not axes.isdisjoint(as_tuple(names)):
            return True
        called = jax.tree.leaves(list(eqn.params.values()))  # branches are in a tuple
        if any(hasattr(x, "eqns") and _has_collective(x, axes) for x in called):
            return True
    return False


def check_copies(state: Any, axes: tuple[Any, ...]) -> None:
    """Raises if the devices of a worker hold different copies of its state."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if differing_copies(x):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} that step returned differs between "
                f"the devices of a worker, along {', '.join(map(repr, axes))}, where "
                "it must be the same: it depends on the device's own share of the "
                "batch, key or shard. Average it over the axis "
                "(slamb_jax.average_parameters for statistics; "
                "slamb_jax.average_gradients before slamb_jax.accumulate), give "
                "slamb_jax.skip_not_finite the same exchange, or report it instead."
            )


def check_together(state: chex.ArrayTree) -> None:
    """Raises for parameters that differ between workers, and that no average gets.

    In a momentum ``optax.multi_transform`` and ``optax.masked`` put a ``MaskedNode`` in
    place of parameters, or of trees of them, that its optimizer does not get, and
    ``muon`` puts None. A part of the state that has leaves there, and elsewhere is like
    the momenta, may be the parameters: it is, if workers agree on the rest of it.
    Nothing is told where parameters are averaged, since workers may then differ between
    two averages.
    """

    def is_link(x: object) -> bool:
        return isinstance(x, MaskMomentumState | AverageParametersState)

    def is_masked(x: object) -> bool:
        return x is None or isinstance(x, optax.MaskedNode)

    links = list(filter(is_link, jax.tree.leaves(state, is_leaf=is_link)))
    momenta = [x.mu for x in links if isinstance(x, MaskMomentumState)]
    if len(momenta) < len(links):
        return
    rows = [
        row
        for mu in momenta
        for row in jax.tree_util.tree_leaves_with_path(mu, is_leaf=is_masked)
    ]
    averaged = {path for path, x in rows if not is_masked(x)}
    above = {path[:k] for path in averaged for k in range(len(path) + 1)}
    left_out = {path: None for path, x in rows if is_masked(x) and path not in above}
    if not left_out:
        return

    def split(x: Any) -> tuple[list[Any], list[Any]]:
        """The leaves of a tree like the momenta that ours step, and the others."""
        ours, others = {}, []
        for path, y in jax.tree_util.tree_leaves_with_path(x):
            if any(path[:k] in left_out for k in range(len(path) + 1)):
                others.append(y)
            else:
                ours[path] = y
        arrays = all(isinstance(y, jax.Array) for y in ours.values())
        alike = arrays and ours.keys() == averaged
        return (list(ours.values()), others) if alike else ([], [])

    def has_others(x: Any) -> bool:
        return bool(split(x)[1])

    for x in filter(has_others, jax.tree.leaves(state, is_leaf=has_others)):
        ours, others = split(x)
        sums = checksums(ours + others)
        unlike = (sums != sums[:, :1]).any((1, 2))
        if unlike.any() and not unlike[: len(ours)].any():
            raise ValueError(
                f"parameters {', '.join(map(jax.tree_util.keystr, left_out))} differ "
                "between workers, and no average gets them: another optimizer steps "
                "them, beside one of this library in optax.multi_transform or "
                "optax.masked. Give the whole as a direction, so that the mean of the "
                "momentum comes first: slamb_jax.mask_momentum(exchange, "
                "optax.multi_transform(...)). Or average the parameters after all, in "
                "float32: optax.chain(optax.multi_transform(...), "
                "slamb_jax.average_parameters_every(slamb_jax.Exchange(axis, "
                "payload=None))). Parameters that are to differ belong into a tree of "
                "their own"
            )


def check_same_values(tree: chex.ArrayTree) -> None:
    """Raises if processes gave :func:`replicate` different values."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    traced = any(isinstance(x, jax.core.Tracer) for _, x in flat)
    if jax.process_count() == 1 or not flat or traced:
        return
    for (path, _), own in zip(flat, checksums([x for _, x in flat]), strict=True):
        if (own != own[:1]).any():
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} must be the same in all processes, "
                "and differs: begin with the same seed, or the same checkpoint, in each"
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
    own = np.stack([np.frombuffer(digest, np.uint32) for digest in digests])
    found = np.asarray(multihost_utils.process_allgather(own))
    exchanges_agree, steps_agree = (found == found[:1]).all((0, 2))
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
