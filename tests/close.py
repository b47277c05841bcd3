"""Comparisons of trees: to units in the last place, to the bit, and across workers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

ROUNDINGS = 8  # gradients of convolutions, sums of thousands of terms, have 6.3


def assert_close(got, want, units=64, floor=0.0):
    """Each entry to so many units in its own last place, however small it is.

    A sum that cancels keeps the roundings of its terms. The terms are as large as the
    leaf's largest entries, so an entry may also be off by eight units in the last place
    of the largest one, but by no more where more ``units`` are asked for.

    ``floor``: the size that every entry at least counts as, for leaves that are a
    difference of larger numbers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(leaves, jax.tree.leaves(want), strict=True):
        name, a, b = jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)
        unit = atol = 0.0
        if jnp.issubdtype(a.dtype, jnp.floating):
            unit = float(jnp.finfo(a.dtype).eps)
            a, b = a.astype(np.float64), b.astype(np.float64)
            largest = np.abs(b).max(initial=0.0, where=np.isfinite(b))
            atol = unit * max(units * floor, min(units, ROUNDINGS) * largest)
        chex.assert_equal_shape([a, b], custom_message=name)
        chex.assert_trees_all_close({name: a}, {name: b}, rtol=units * unit, atol=atol)


def _words(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.view(f"u{x.itemsize}") if jnp.issubdtype(x.dtype, jnp.floating) else x


def assert_same_bits(got, want):
    """That 0 and -0 differ, and NaNs may agree, chex does not say."""
    chex.assert_trees_all_equal_dtypes(got, want)
    chex.assert_trees_all_equal(*jax.tree.map(_words, (got, want)), strict=True)


def assert_workers_agree(tree):
    """Leaves with a leading axis of workers: all have the bits of the first."""
    first = jax.tree.map(lambda x: np.stack([np.asarray(x)[0]] * len(x)), tree)
    assert_same_bits(jax.tree.map(np.asarray, tree), first)


def assert_agree_but(tree, names, drifts=False):
    """All workers' states agree to the bit, but for the fields of these names.

    Where workers step by themselves, ``drifts``, only counts agree, and what follows
    from averages.
    """
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        fields = {getattr(key, "name", None) for key in path}
        shared = fields & {"anchor", "outer"} or x.dtype == jnp.int32
        if shared or not (drifts or fields & set(names)):
            assert_workers_agree(x)
