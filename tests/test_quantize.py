"""Quantizers: right on average, exact where they must be, loud where they must be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax._hashing import hash_u32

QUANTIZERS = {
    "uniform8": slamb_jax.StochasticUniform(8, block_size=64),
    "uniform4": slamb_jax.StochasticUniform(4, block_size=64),
    "natural8": slamb_jax.NaturalCompression(8, block_size=64),
    "natural4": slamb_jax.NaturalCompression(4, block_size=64),
}
each = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)


def salts(count):
    return hash_u32(jnp.arange(count, dtype=jnp.uint32), 12345)


def draws(size=333, seed=0):
    """Of many sizes, zeros and powers of two among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * np.exp(rng.normal(size=size))
    x[::17] = 0.0
    x[1::29] = 2.0 ** rng.integers(-9, 3, len(x[1::29]))
    return jnp.asarray(x, jnp.float32)


def trip(quantizer, x, salt):
    return quantizer.decode(quantizer.encode(x, salt), x.shape[-1])


@each
def test_right_on_average(quantizer):
    x, count = draws(), 6000
    y = np.asarray(jax.jit(jax.vmap(lambda s: trip(quantizer, x, s)))(salts(count)))
    error = y.astype(np.float64).mean(0) - np.asarray(x, np.float64)
    deviation = y.std(0, dtype=np.float64)
    random = deviation > 0.1 * np.ptp(y, axis=0)  # else too few fell to one side
    random &= deviation > 0
    assert random.sum() > 200
    z = error[random] / deviation[random] * count**0.5
    assert np.abs(z).max() < 4.5
    assert 0.8 < np.sqrt(np.mean(z**2)) < 1.2  # as chance has it, no better, no worse
    rare = (
        np.abs(error[~random])
        / np.maximum(np.ptp(y, axis=0), 1e-3 * np.abs(x) + 1e-9)[~random]
    )
    assert rare.max() < 0.01


@pytest.mark.parametrize("bits", [8, 4])
def test_uniform_errs_by_less_than_a_step(bits):
    quantizer, x = slamb_jax.StochasticUniform(bits, block_size=100), draws(300)
    y = np.asarray(trip(quantizer, x, jnp.uint32(3))).reshape(3, 100)
    blocks = np.asarray(x).reshape(3, 100)
    step = np.abs(blocks).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
    assert (np.abs(y - blocks) < step * 1.001).all()
    assert len(np.unique(np.round(y / step))) <= 2**bits - 1
    assert (np.abs(y - blocks) > 0.3 * step).any()  # it does round


def test_natural_is_a_neighbouring_power_of_two():
    x = draws()
    y = np.asarray(trip(slamb_jax.NaturalCompression(block_size=64), x, jnp.uint32(3)))
    some = np.asarray(x) != 0
    x, y = np.asarray(x)[some], y[some]
    low = 2.0 ** np.floor(np.log2(np.abs(x)))
    assert np.isin(y / np.sign(x) / low, (1.0, 2.0)).all()
    exact = np.abs(x) == low
    assert exact.any()
    np.testing.assert_array_equal(y[exact], x[exact])


def test_natural_of_four_bits_ends_at_a_limit():
    quantizer = slamb_jax.NaturalCompression(4, block_size=64)
    x = jnp.full(64, 0.01).at[0].set(-8.0)  # the limit is 8 / 2**6
    y = np.concatenate([np.asarray(trip(quantizer, x, s))[1:] for s in salts(60)])
    assert set(np.unique(y)) == {0.0, 0.125}
    assert y.mean() == pytest.approx(0.01, rel=0.2)


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_a_number_to_anyone(quantizer, bad):
    x = draws().at[200].set(bad)
    y = jax.jit(lambda x: trip(quantizer, x, jnp.uint32(3)))(x)
    assert not jnp.isfinite(y[200])
    assert jnp.isfinite(y[:100]).all()  # other blocks know nothing of it


@each
def test_zeros_stay_and_extremes_are_finite(quantizer):
    zeros = jnp.zeros(130)
    assert (trip(quantizer, zeros, jnp.uint32(5)) == 0).all()
    x = np.asarray(draws())
    assert (np.asarray(trip(quantizer, draws(), jnp.uint32(5)))[x == 0] == 0).all()
    for size in (3e38 / 2, 1e-30, 1e-37, 1e-42):
        x = draws(64) / 40 * size
        y = trip(quantizer, x, jnp.uint32(5))
        assert jnp.isfinite(y).all()
        assert jnp.abs(y).max() <= 2 * jnp.abs(x).max() + 1e-35


@each
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 129, 1000])
def test_bytes_are_those_announced(quantizer, size):
    codes = quantizer.encode(jnp.ones((3, size)), jnp.uint32(0))
    assert codes.dtype == jnp.uint8
    assert codes.shape == (3, quantizer.nbytes(size))
    assert quantizer.decode(codes, size).shape == (3, size)
    each, blocks = quantizer.bits / 8, size // 64 + 1
    assert quantizer.nbytes(size) <= (size + 64) * each + blocks * 5


@each
def test_the_same_salt_gives_the_same_bits(quantizer):
    x = draws()
    one, again = (quantizer.encode(x, jnp.uint32(9)) for _ in range(2))
    assert one.tobytes() == again.tobytes()
    other = quantizer.encode(x, jnp.uint32(10))
    assert one.tobytes() != other.tobytes()
    rows = np.asarray(quantizer.encode(jnp.stack([x, x]), jnp.uint32(9)))
    assert (rows[0] != rows[1]).any()  # nor do two slices share their chances
