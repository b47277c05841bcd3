"""Whether replicas agree, by a few numbers of each."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._checks import check_range
from slamb_jax._collectives import widened
from slamb_jax._hashing import hash_u32
from slamb_jax._replicas import check_replicas, everywhere, is_key, local

_SKETCHES = 16  # random projections of a leaf


def assert_replicas_agree(tree: chex.ArrayTree, rtol: float = 0.0) -> None:
    r"""Raises unless all replicas are the same, and names the leaves that differ.

    Each device boils each leaf of its own down to a few numbers, and only those are
    gathered. With ``rtol=0`` that is a 64-bit checksum of the bits (and two different
    replicas pass with a chance of :math:`2^{-64}`; never if they differ in a single
    element): what :func:`average_parameters` returns passes. With a tolerance it is 16
    random projections, with signs :math:`s \in \{-1, 1\}^d` from a hash,

    .. math::

      \frac{1}{16} \sum_{k=1}^{16} \big((p_i - p_1) \cdot s_k\big)^2
      \le (rtol\,\|p_1\|)^2

    whose left side is :math:`\|p_i - p_1\|^2` on average, its root right to a fifth.
    After :func:`average_parameters_every` the parameters pass with 1e-5, in 16 bits
    with 1e-2. Moments differ from worker to worker by design; counts do not.

    Args:
      tree: parameters, counts, what should be the same: arrays with a leading replica
        axis. With several processes, each must call it.
      rtol: largest norm of a difference, as a share of the leaf's norm; not negative.
        Below 1e-6 float32 cannot tell. Leaves that are not floating point must be the
        same to the bit.

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
    paths = [jax.tree_util.keystr(path) for path, _ in _leaves(tree)]
    unlike = differing([x for _, x in _leaves(tree)], rtol)
    if bad := [(p, u) for p, u in zip(paths, unlike, strict=True) if u]:
        named = ", ".join(f"{p or 'the tree'} (of {u} from the first)" for p, u in bad)
        raise AssertionError(
            f"replicas differ in {len(bad)} of {len(paths)} leaves: {named}"
        )


def _leaves(tree: chex.ArrayTree) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(tree)


def differing(leaves: list[Any], rtol: float) -> list[int]:
    """How many replicas of each leaf differ from the first."""
    unlike = np.zeros(len(leaves), int)
    loose = [rtol > 0 and _is_floating(x) for x in leaves]
    for kind, numbers in ((False, checksums), (True, _sketches)):
        places = [i for i, x in enumerate(loose) if x == kind]
        if not places:
            continue
        found = numbers([leaves[i] for i in places])
        if kind:
            off = np.sqrt(np.mean(np.square(found - found[:, :1])[..., :-1], -1))
            same = off <= rtol * found[:, :1, -1]  # a NaN is never the same
        else:
            same = (found == found[:, :1]).all(-1)
        unlike[places] = (~same).sum(1)
    return unlike.tolist()


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def checksums(leaves: list[Any]) -> np.ndarray:
    """A checksum of each replica of each leaf: uint32, (leaves, replicas, 2)."""
    bits = [jax.random.key_data(x) if is_key(x) else x for x in leaves]
    return np.asarray(local(everywhere(_checksum_all, bits)))


def _sketches(leaves: list[Any]) -> np.ndarray:
    """Projections of each replica, and its norm: (leaves, replicas, 17)."""
    return np.asarray(local(everywhere(_sketch_all, leaves)))


def _checksum_all(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_checksum(x) for x in leaves])


def _checksum(x: jax.Array) -> jax.Array:
    """Two sums of a hash of each element's bits and place, of each replica."""
    words = _words(x).reshape(x.shape[0], -1)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    hashed = [hash_u32(words ^ np.uint32(s), place[None]) for s in (0, 0x9E3779B9)]
    return jnp.stack([jnp.sum(x, axis=1, dtype=jnp.uint32) for x in hashed], axis=1)


def _words(x: jax.Array) -> jax.Array:
    """The bits of ``x`` as uint32; where an element has 64, as two."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def _sketch_all(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sketch(x) for x in leaves])


def _sketch(x: jax.Array) -> jax.Array:
    flat = widened(x).astype(jnp.float32).reshape(x.shape[0], -1)
    place = jnp.arange(flat.shape[1], dtype=jnp.uint32)
    signs = hash_u32(place, 0x51A3B)

    def projection(k: int) -> jax.Array:
        negative = (signs >> np.uint32(k)) & np.uint32(1) == 1
        return jnp.sum(jnp.where(negative[None], -flat, flat), axis=1)

    norm = jnp.sqrt(jnp.sum(jnp.square(flat), axis=1))
    return jnp.stack([*(projection(k) for k in range(_SKETCHES)), norm], axis=1)
