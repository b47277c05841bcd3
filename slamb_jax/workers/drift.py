"""What a step must leave equal: on the devices of a worker, and between workers."""

from typing import Any

import jax

from slamb_jax.workers.agreement import differing
from slamb_jax.workers.checksums import checksums, differing_copies


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
