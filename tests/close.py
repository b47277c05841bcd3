"""Comparisons whose tolerance is in units in the last place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(got: Any, want: Any, units: float = 64, floor: float = 0.0) -> None:
    """Each leaf to so many units in the last place of its largest entry.

    ``floor``: the size that the largest entry at least counts as, for leaves that are
    a difference of larger numbers.
    """
    paths = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(paths, jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        name = jax.tree_util.keystr(path)
        assert a.shape == b.shape, name
        if not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(a, b, err_msg=name)
            continue
        unit = float(jnp.finfo(a.dtype).eps)
        a, b = a.astype(np.float64), b.astype(np.float64)
        largest = np.abs(b).max(initial=0.0, where=np.isfinite(b))
        room = units * unit * max(floor, largest)
        np.testing.assert_allclose(a, b, rtol=0, atol=room, err_msg=name)


def assert_same_bits(got: Any, want: Any) -> None:
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = (
            np.asarray(jax.random.key_data(x) if "key<" in str(x.dtype) else x)
            for x in (a, b)
        )
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def assert_near(got: Any, want: Any, tolerance: float) -> None:
    """Each entry, for what is rounded on the way to a grid of its own."""
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
