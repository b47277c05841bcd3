"""Whether replicas agree: to the bit, or to a tolerance."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._tree.checks import check_range
from slamb_jax._tree.rounding import upcast_f32
from slamb_jax.workers.checksums import checksums, differing_copies
from slamb_jax.workers.mesh import local, replicated
from slamb_jax.workers.replicas import check_replicas


def assert_replicas_agree(tree: chex.ArrayTree, rtol: float = 0.0) -> None:
    r"""Raises unless all replicas are the same, and names the leaves that differ.

    With ``rtol=0`` a 64-bit checksum of each replica's bits is compared, and only
    checksums are communicated; two different replicas pass with a chance of
    :math:`2^{-64}`. What :func:`average_parameters` returns passes. With a tolerance
    the first replica is sent to all, and each replica :math:`p_i` must be near it:

    .. math:: \|p_i - p_1\| \le rtol\,\|p_1\|

    After :func:`average_parameters_every` the parameters pass with 1e-5, in 16 bits
    with 1e-2. Moments differ between workers by design; counts do not.

    Where a worker has several devices, their copies of one replica must be the same
    to the bit, whatever ``rtol`` is.

    Args:
      tree: what must be the same, such as parameters and counts: arrays with a leading
        replica axis. With several processes, each must call it.
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
    names = [jax.tree_util.keystr(path) or "the tree" for path, _ in flat]
    leaves = [x for _, x in flat]
    copies = zip(names, differing_copies(leaves), strict=True)
    if bad := [
        f"{name} (of replica {', '.join(map(str, r))})" for name, r in copies if r
    ]:
        raise AssertionError(
            f"the devices of a replica hold different copies in {len(bad)} of "
            f"{len(names)} leaves: {', '.join(bad)}"
        )
    counts = zip(names, differing(leaves, rtol), strict=True)
    if bad := [f"{name} (of {k} from the first)" for name, k in counts if k]:
        raise AssertionError(
            f"replicas differ in {len(bad)} of {len(names)} leaves: {', '.join(bad)}"
        )


def differing(leaves: list[Any], rtol: float) -> list[int]:
    """How many replicas of each leaf differ from the first."""
    loose = [
        rtol > 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves
    ]
    near, exact = (
        [i for i, x in enumerate(loose) if x == kind] for kind in (True, False)
    )
    unlike = np.zeros(len(leaves), int)
    if exact:
        sums = checksums([leaves[i] for i in exact])
        unlike[exact] = (sums != sums[:, :1]).any(-1).sum(1)
    if near:
        found = np.asarray(local(replicated(_distances, [leaves[i] for i in near])))
        distance, norm = found[..., :-1], found[..., -1:]
        unlike[near] = (~(distance <= rtol * norm)).sum(1)  # a NaN is never near
    return unlike.tolist()


def _distances(leaves: list[jax.Array]) -> jax.Array:
    """Each replica's distance to the first, and the first's norm: (leaves, n + 1)."""

    def of_leaf(x: jax.Array) -> jax.Array:
        wide = upcast_f32(x).reshape(x.shape[0], -1)
        apart = jnp.linalg.norm(wide - wide[:1], axis=1)
        return jnp.append(apart, jnp.linalg.norm(wide[0])).astype(jnp.float32)

    return jnp.stack([of_leaf(x) for x in leaves])
