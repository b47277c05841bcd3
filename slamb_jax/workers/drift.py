"""What a step must leave equal: on the devices of a worker, and between workers."""

import warnings
from collections.abc import Hashable
from typing import Any

import jax
from jax.extend import core

from slamb_jax._axes import as_tuple
from slamb_jax.workers.agreement import differing
from slamb_jax.workers.checksums import checksums, differing_copies

# Over an axis, but of this worker alone.
_LOCAL = ("axis_index", "pvary", "pcast", "pbroadcast")


def warn_if_alone(program: core.ClosedJaxpr, axes: tuple[Hashable, ...]) -> None:
    """Warns if a traced step has no collective over the axes of the workers."""
    if not _has_collective(program, set(axes)):
        names = ", ".join(map(repr, axes))
        warnings.warn(
            f"step changes most of the state and communicates nothing over {names}: "
            "each worker trains by itself, on its share of the batch. Give the "
            "optimizer the exchange, slamb_jax.adamw(rate, exchange) in place of "
            "optax.adamw; if this step is local on purpose, filter this warning",
            UserWarning,
            stacklevel=5,  # who called the step
        )


def _has_collective(program: Any, axes: set[Hashable]) -> bool:
    def over(eqn: core.JaxprEqn) -> bool:
        names = eqn.params.get("axes", eqn.params.get("axis_name"))
        return eqn.primitive.name not in _LOCAL and not axes.isdisjoint(as_tuple(names))

    return any(
        over(eqn) or any(_has_collective(x, axes) for x in _called(eqn))
        for eqn in program.eqns
    )


def _called(eqn: core.JaxprEqn) -> list[Any]:
    """The programs that an equation calls, or chooses from."""
    values = [x if isinstance(x, tuple) else (x,) for x in eqn.params.values()]
    return [x for row in values for x in row if hasattr(x, "eqns")]


def check_copies(state: Any, axes: tuple[Any, ...]) -> None:
    """Raises if the devices of a worker hold different copies of its state."""
    flat = jax.tree_util.tree_leaves_with_path(state)
    copies = differing_copies([x for _, x in flat])
    for (path, _), replicas in zip(flat, copies, strict=True):
        if replicas:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} that step returned differs between "
                f"the devices of a worker, along {', '.join(map(repr, axes))}, where "
                "it must be the same: it depends on the device's own share of the "
                "batch, key or shard. Average it over the axis "
                "(slamb_jax.average_parameters for statistics; "
                "slamb_jax.average_gradients before slamb_jax.accumulate), give "
                "slamb_jax.skip_not_finite the same exchange, or report it instead."
            )


def check_together(state: Any, apart: set[int]) -> None:
    """Raises if parameters that no average gets differ between the workers."""
    flat = jax.tree_util.tree_leaves_with_path(state)
    rows = [flat[i] for i in sorted(apart)]
    leaves = [x for _, x in rows]
    unlike = differing(leaves, checksums(leaves), 0.0)
    for (path, _), apart_by in zip(rows, unlike, strict=True):
        if apart_by:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} differs between workers, and no "
                "average gets it: another optimizer steps it, beside one of this "
                "library in optax.multi_transform or optax.masked. Put one average "
                "behind all of them: optax.chain(optax.multi_transform(...), "
                "slamb_jax.average_parameters_every(exchange)). What is to differ "
                "belongs into a tree of parameters of its own"
            )
