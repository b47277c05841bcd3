"""Rounding that no compiler removes, and means of 16-bit arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax._collectives import pmean
from slamb_jax._rounding import round_to
from tests.workers import AXIS, P, mesh_of, over_workers


def draws(n, size):
    x = np.random.default_rng(n).normal(size=(n, size)).astype(np.float32)
    return jnp.asarray(x).astype(jnp.bfloat16)


def assert_mean_rounded_once(got, x):
    """To a unit in the last place: the order of the sum may tip it."""
    assert got.dtype == x.dtype
    got = np.asarray(got, np.float32)
    assert (got == got[0]).all()
    want = np.asarray(jnp.mean(x.astype(jnp.float32), 0).astype(x.dtype), np.float32)
    np.testing.assert_allclose(got[0], want, rtol=2**-7, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_to_is_a_cast_that_stays(dtype):
    spread = np.exp(np.random.default_rng(0).uniform(-85, 85, 20_000))
    signs = np.random.default_rng(1).choice([-1, 1], 20_000)
    edges = [np.nan, np.inf, 0.0, -0.0, 2**-24, 2**-25, 6.1e-5, 65519, 65520, 1e-39]
    x = jnp.asarray(np.concatenate([signs * spread, edges]), jnp.float32)
    got = np.asarray(jax.jit(round_to, static_argnums=1)(x, dtype))
    want = np.asarray(x.astype(dtype))
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    # No compiler may leave it out, as it may a cast there and back.
    explicit = "reduce_precision" in str(jax.make_jaxpr(round_to, (1,))(x, dtype))
    assert explicit == (dtype != "float32")


def test_a_mean_over_one_worker_does_not_vary():
    mean = functools.partial(slamb_jax.average_parameters, axis_name=AXIS)
    run = jax.shard_map(mean, mesh=mesh_of(1), in_specs=P(AXIS), out_specs=P())
    assert (np.asarray(jax.jit(run)(jnp.ones((1, 3)))) == 1).all()


@pytest.mark.parametrize("n", [2, 3, 17])
def test_a_mean_is_rounded_once(n):
    x, y = draws(n, 37), draws(n, 5)
    mean = jax.vmap(lambda *arrays: pmean(arrays, AXIS), axis_name=AXIS)
    for got, given in zip(jax.jit(mean)(x, y), (x, y), strict=True):
        assert_mean_rounded_once(got, given)


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_over_two_axes_of_a_mesh(mapping):
    axes, x = ("node", "device"), draws(8, 37)
    mean = over_workers(lambda x: pmean([x], axes)[0], mapping, 8, axes)
    assert_mean_rounded_once(mean(x), x)
