"""Means of 16-bit arrays, over one axis and over two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import slamb_jax
from slamb_jax.exchange.collectives import mean_over, narrowed


def draws(n, size):
    x = np.random.default_rng(n).normal(size=(n, size)).astype(np.float32)
    return jnp.asarray(x).astype(jnp.bfloat16)


def rounded_once(x):
    return np.asarray(jnp.mean(x.astype(jnp.float32), 0).astype(x.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_narrowed_is_a_cast_that_stays(dtype):
    spread = np.exp(np.random.default_rng(0).uniform(-85, 85, 20_000))
    signs = np.random.default_rng(1).choice([-1, 1], 20_000)
    edges = [np.nan, np.inf, 0.0, -0.0, 2**-24, 2**-25, 6.1e-5, 65519, 65520, 1e-39]
    x = jnp.asarray(np.concatenate([signs * spread, edges]), jnp.float32)
    got, want = (np.asarray(y) for y in (jax.jit(narrowed, static_argnums=1)(x, dtype),
                                         x.astype(dtype)))  # fmt: skip
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    # No compiler may leave it out, as it may a cast there and back.
    explicit = "reduce_precision" in str(jax.make_jaxpr(narrowed, (1,))(x, dtype))
    assert explicit == (dtype != "float32")


def test_a_mean_over_one_worker_does_not_vary():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    mean = functools.partial(slamb_jax.average_parameters, axis_name="data")
    run = jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert (np.asarray(jax.jit(run)(jnp.ones((1, 3)))) == 1).all()


@pytest.mark.parametrize("n", [2, 3, 17])
def test_it_is_rounded_once(n):
    x, y = draws(n, 37), draws(n, 5)
    mean = functools.partial(mean_over, axis_name="data")
    got = jax.vmap(lambda *arrays: mean(arrays), axis_name="data")(x, y)
    for g, given in zip(got, (x, y), strict=True):
        assert g.dtype == jnp.bfloat16
        assert (np.asarray(g) == np.asarray(g)[0]).all()
        want = rounded_once(given).astype(np.float32)
        ulp = np.abs(want) * 2**-7  # the order of the sum may tip a last bit
        assert (np.abs(np.asarray(g[0], np.float32) - want) <= ulp).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_over_two_axes_of_a_mesh(check_vma):
    axes, x = ("node", "device"), draws(8, 37)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), axes)
    step = jax.shard_map(
        lambda x: mean_over([x[0]], axes)[0][None],
        mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=check_vma,
    )  # fmt: skip
    got = np.asarray(jax.jit(step)(x), np.float32)
    assert (got == got[0]).all()
    np.testing.assert_allclose(got[0], rounded_once(x).astype(np.float32), rtol=2**-7)
