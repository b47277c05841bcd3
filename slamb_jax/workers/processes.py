"""What several processes must have in common, looked at before they first exchange."""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax.exchange import Exchange
from slamb_jax.workers.checksums import checksums
from slamb_jax.workers.mesh import replicated

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def check_same_values(tree: Any, alike: Sequence[bool]) -> None:
    """Raises if processes gave :func:`replicate` other values of the leaves alike."""
    if jax.process_count() == 1:
        return
    flat = jax.tree_util.tree_leaves_with_path(tree)
    rows = [row for row, same in zip(flat, alike, strict=True) if same]
    if not rows or any(isinstance(x, jax.core.Tracer) for _, x in rows):
        return
    sums = checksums([x for _, x in rows])
    for (path, _), own in zip(rows, sums, strict=True):
        if (own != own[:1]).any():
            raise ValueError(
                f"tree{jax.tree_util.keystr(path)} must be the same in all processes, "
                "and differs: begin with the same seed, or the same checkpoint, in each"
            )


def check_same_step(
    exchange: Exchange, lowered: jax.stages.Lowered, mesh: Mesh
) -> None:
    """Raises if processes are about to run steps that are not the same.

    They would wait for each other for ever, or add up what does not belong together.
    """
    own = _digest(_ADDRESS.sub("", repr(exchange))), _digest(lowered.as_text())
    row = np.concatenate(own)
    there = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.size, len(row))
    rows = jax.make_array_from_callback(
        shape, there, lambda index: np.broadcast_to(row, shape)[index]
    )
    found = np.asarray(replicated(_rows, rows))
    same = (found == found[:1]).all(0).reshape(2, -1).all(1)
    if not same[0]:
        raise ValueError(
            f"exchange must be the same in all processes, and differs; here it is "
            f"{exchange!r}"
        )
    if not same[1]:
        raise ValueError(
            "step must be the same program in all processes, and differs, though the "
            "exchange is the same: a rate, a seed, a size or a version is not"
        )


def _digest(text: str) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.uint32)


def _rows(x: jax.Array) -> jax.Array:
    return x
