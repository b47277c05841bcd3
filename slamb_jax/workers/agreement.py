"""Whether replicas agree: to the bit, or to a tolerance."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._checks import check_range
from slamb_jax._rounding import upcast_f32
from slamb_jax.workers.checksums import checksums, differing_copies
from slamb_jax.workers.mesh import replicated
from slamb_jax.workers.replicas import check_replicas


def assert_replicas_agree(tree: chex.ArrayTree, rtol: float = 0.0) -> None:
    r"""Raises unless all replicas are the same, and names the leaves that differ.

    Replicas must be the same to the bit, and only a 64-bit checksum of each is
    communicated; or, with a tolerance, each replica :math:`p_i` must be near the first:

    .. math:: \|p_i - p_1\| \le rtol\,\|p_1\|

    What :func:`average_parameters` returns passes with 0. After
    :func:`average_parameters_every` the parameters pass with 1e-5, in 16 bits with
    1e-2. Counts pass; moments differ between workers by design. The copies on the
    devices of one worker must be the same to the bit, whatever ``rtol`` is.

    Args:
      tree: arrays with a leading replica axis. With several processes, each must call
        it.
      rtol: largest norm of a difference, relative to the leaf's norm; not negative.
        Leaves that are not floating point must be the same to the bit.

    Raises:
      AssertionError: if replicas differ.
      ValueError: for a leaf without a leading axis, or ``rtol`` out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tree = {"w": jnp.array([[1.0, 2.0], [1.0, 2.5]]), "b": jnp.ones((2, 3))}
      >>> slamb_jax.assert_replicas_agree(tree, rtol=0.5)
      >>> slamb_jax.assert_replicas_agree(tree)
      Traceback (most recent call last):
      AssertionError: replicas differ in 1 of 2 leaves: ['w'] (of 1 from the first)
    """
    check_range("rtol", rtol, 0.0, open_high=True)
    check_replicas("tree", tree)
    flat = jax.tree_util.tree_leaves_with_path(tree)
    if not flat:
        return
    names = [jax.tree_util.keystr(path) or "the tree" for path, _ in flat]
    leaves = [x for _, x in flat]

    def check(what: str, found: list[str]) -> None:
        bad = [f"{name} (of {x})" for name, x in zip(names, found, strict=True) if x]
        if bad:
            raise AssertionError(
                f"{what} in {len(bad)} of {len(names)} leaves: {', '.join(bad)}"
            )

    copies = [", ".join(map(str, replicas)) for replicas in differing_copies(leaves)]
    check(
        "the devices of a replica hold different copies",
        [f"replica {x}" if x else "" for x in copies],
    )
    counts = differing(leaves, checksums(leaves), rtol)
    check("replicas differ", [f"{k} from the first" if k else "" for k in counts])


def differing(leaves: list[Any], sums: np.ndarray, rtol: float) -> np.ndarray:
    """How many replicas of each leaf differ from the first; ``sums``: checksums."""
    unlike = (sums != sums[:, :1]).any(-1).sum(1)
    near = [
        i
        for i, x in enumerate(leaves)
        if rtol > 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
    ]
    if near:
        found = np.asarray(replicated(_distances, [leaves[i] for i in near]))
        distance, norm = found[..., :-1], found[..., -1:]
        unlike[near] = (~(distance <= rtol * norm)).sum(1)  # a NaN is never near
    return unlike


def _distances(leaves: list[jax.Array]) -> jax.Array:
    """Each replica's distance to the first, and the first's norm: (leaves, n + 1)."""

    def of_leaf(x: jax.Array) -> jax.Array:
        wide = upcast_f32(x).reshape(x.shape[0], -1)
        apart = jnp.linalg.norm(wide - wide[:1], axis=1)
        return jnp.append(apart, jnp.linalg.norm(wide[0])).astype(jnp.float32)

    return jnp.stack([of_leaf(x) for x in leaves])
