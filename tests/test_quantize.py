"""Quantizers: right on average, exact where they must be, of the bytes announced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slamb_jax._ex.payloads import codes
from slamb_jax._ex.payloads.codes import shape_of
from slamb_jax.payloads import LargestOf, StochasticUniform, Ternary

from slamb_jax._rounding import hash_u32

RANDOM = {
    "uniform8": StochasticUniform(8, block_size=64),
    "uniform4": StochasticUniform(4, block_size=64),
}
QUANTIZERS = RANDOM | {
    "ternary": Ternary(block_size=64),
    "largest_of_7": LargestOf(count=7, block_size=64),
    "largest_of_12": LargestOf(count=12, block_size=60),
}
each = pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
random = pytest.mark.parametrize("quantizer", RANDOM.values(), ids=RANDOM)


def draws(size=333, seed=0):
    """Of many sizes, zeros and powers of two among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * np.exp(rng.normal(size=size))
    x[::17] = 0.0
    x[1::29] = 2.0 ** rng.integers(-9, 3, len(x[1::29]))
    return jnp.asarray(x.astype(np.float32))


def in_blocks(quantizer, x):
    """A row of all planes of a group is a block."""
    cut = x.reshape(quantizer.shape_of(x.size))
    return cut.swapaxes(1, 2).reshape(-1, cut.shape[1] * cut.shape[3])


@functools.cache
def there_and_back(quantizer):
    return jax.jit(lambda x, s: quantizer.decode(quantizer.encode(x, s), x.shape[-1]))


def round_trip(quantizer, x, seed):
    return np.asarray(there_and_back(quantizer)(x, jnp.uint32(seed)))


@random
def test_right_on_average(quantizer):
    x, count = draws(), 6000
    seeds = hash_u32(jnp.arange(count, dtype=jnp.uint32), 12345)

    def one(seed):
        return quantizer.decode(quantizer.encode(x, seed), len(x))

    y = np.asarray(jax.jit(jax.vmap(one))(seeds))
    error = y.astype(np.float64).mean(0) - np.asarray(x, np.float64)
    deviation, spread = y.std(0, dtype=np.float64), np.ptp(y, axis=0)
    drawn = (deviation > 0.1 * spread) & (deviation > 0)  # else few fell to one side
    assert drawn.sum() > 200
    z = error[drawn] / deviation[drawn] * count**0.5
    assert np.abs(z).max() < 4.5
    assert 0.8 < np.sqrt(np.mean(z**2)) < 1.2  # as by chance, no better and no worse
    smallest = 1e-3 * np.abs(x) + 1e-9
    assert (np.abs(error) / np.maximum(spread, smallest))[~drawn].max() < 0.01


@pytest.mark.parametrize("threshold", [0.5, 1.0, 2.5])
def test_ternary_sends_what_is_large_and_the_rest_in_time(threshold):
    ternary = Ternary(block_size=80, threshold=threshold)
    x = np.asarray(draws(640))
    y = round_trip(ternary, jnp.asarray(x), 0)
    blocks, sent = np.abs(in_blocks(ternary, x)), in_blocks(ternary, y)
    assert blocks.shape == (8, 80)
    large = blocks > threshold * blocks.mean(1, keepdims=True)
    # A coordinate at the threshold may fall to either side of it.
    np.testing.assert_array_equal(sent != 0, large)
    np.testing.assert_array_equal(np.sign(y[y != 0]), np.sign(x[y != 0]))
    for row, size, where in zip(sent, blocks, large, strict=True):
        np.testing.assert_allclose(np.abs(row[where]), size[where].mean(), rtol=1e-5)
    rest = x
    for _ in range(60):
        rest = rest - round_trip(ternary, jnp.asarray(rest), 0)
    assert np.linalg.norm(rest) < 0.03 * np.linalg.norm(x)


@pytest.mark.parametrize("count", [2, 3, 7, 8, 31, 127])
def test_the_largest_of_each_group_is_sent_and_the_rest_in_time(count):
    quantizer = LargestOf(count=count, block_size=4 * 127)
    x = np.asarray(draws(quantizer.shape_of(5000).size))
    y = round_trip(quantizer, jnp.asarray(x), 0)
    cut = quantizer.shape_of(x.size)
    groups = (cut.groups, cut.planes // count, count, cut.rows, cut.width)
    a, sent = np.abs(x).reshape(groups), y.reshape(groups)
    largest = a == a.max(2, keepdims=True)
    largest &= a >= a.mean((1, 2, 4), keepdims=True)  # of the block
    chosen = sent != 0
    assert chosen.sum(2).max() == 1  # of equal ones the first
    assert (chosen <= largest).all()
    np.testing.assert_array_equal(chosen.any(2), largest.any(2))
    np.testing.assert_array_equal(np.sign(y[y != 0]), np.sign(x[y != 0]))
    count_of, total = (
        z.sum((1, 2, 4)) for z in (chosen, np.where(chosen, a.astype(np.float64), 0))
    )
    scale = np.where(count_of > 0, total / np.maximum(count_of, 1), 0)
    want = np.where(chosen, scale[:, None, None, :, None], 0)
    np.testing.assert_allclose(np.abs(sent), want, rtol=1e-5)
    rest = x
    for _ in range(40 * count):
        rest = rest - round_trip(quantizer, jnp.asarray(rest), 0)
    assert np.linalg.norm(rest) < 0.1 * np.linalg.norm(x)


@pytest.mark.parametrize("size", [0.1, 1e-30, 1e30])
def test_ternary_keeps_signs_of_one_size(size):
    """As Adam's first step has, and every step of Lion."""
    x = size * jnp.sign(draws(640))
    np.testing.assert_allclose(round_trip(Ternary(), x, 0), x, rtol=1e-5)


@each
def test_a_block_that_is_not_finite_is_decoded_as_not_finite(quantizer):
    size = quantizer.shape_of(333).size  # of whole blocks
    where = in_blocks(quantizer, np.arange(size) == 200).any(1)
    assert where.sum() == 1
    for bad in (np.nan, np.inf, -np.inf):
        y = round_trip(quantizer, draws(size).at[200].set(bad), 3)
        assert not np.isfinite(y[200])
        assert np.isfinite(in_blocks(quantizer, y)[~where]).all()


@each
def test_zeros_stay_and_extremes_are_finite(quantizer):
    assert (round_trip(quantizer, jnp.zeros(130), 5) == 0).all()
    x = np.asarray(draws())
    assert (round_trip(quantizer, draws(), 5)[x == 0] == 0).all()
    for size in (3e38 / 2, 1e-30, 1e-37, 1e-42):
        x = draws(64) / 40 * size
        y = round_trip(quantizer, x, 5)
        assert np.isfinite(y).all()
        assert np.abs(y).max() <= 2 * np.abs(x).max() + 1e-35


@each
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 129, 1000])
def test_bytes_are_those_announced(quantizer, size):
    x = jax.ShapeDtypeStruct((3, size), jnp.float32)
    codes = jax.eval_shape(quantizer.encode, x, jax.ShapeDtypeStruct((), jnp.uint32))
    assert codes.dtype == jnp.uint8
    assert codes.shape == (3, quantizer.nbytes(size))
    decoded = jax.eval_shape(lambda codes: quantizer.decode(codes, size), codes)
    assert decoded.shape == (3, size)
    per_element, blocks = quantizer.bits / 8, size // 60 + 1
    assert quantizer.nbytes(size) <= (size + 64) * per_element + blocks * 5


@random
def test_the_same_seed_gives_the_same_bits(quantizer):
    x = draws()
    encode = jax.jit(quantizer.encode)
    one, again, other = (encode(x, jnp.uint32(s)).tobytes() for s in (9, 9, 10))
    assert one == again != other
    rows = np.asarray(encode(jnp.stack([x, x]), jnp.uint32(9)))
    assert (rows[0] != rows[1]).any()  # nor do two slices share their chances


@pytest.mark.parametrize(
    ("bits", "block_size"), [(2, 640), (4, 256), (8, 256), (2, 33)]
)
def test_arrays_are_cut_into_tiles_and_little_is_padded(bits, block_size):
    per_byte = {2: 5, 4: 2, 8: 1}[bits]
    for size in (1, 7, 639, 641, 5119, 10_000, 100_003, 2**20, 2**20 + 1, 3 * 2**22):
        shape = shape_of(size, block_size, per_byte)
        groups, planes, rows, width = shape
        assert planes % per_byte == 0
        assert planes * width <= block_size
        assert shape.size - size <= max(groups * planes * rows, 0.02 * size)
        if size >= 512 * block_size and block_size >= 256:
            assert (rows, width) == (8, 128)
            assert shape_of(shape.size, block_size, per_byte) == shape  # is full


@pytest.mark.parametrize(("base", "count"), [(3, 5), (16, 2), (256, 1)])
def test_a_byte_gives_back_its_digits(base, count, monkeypatch):
    """All bytes there are, read as a CPU reads them and as other chips do."""
    places = np.indices((base,) * count).reshape(count, -1, 1, 1).astype(np.uint8)
    packed = codes.pack([jnp.asarray(x) for x in places], base)
    assert len(np.unique(packed)) == base**count
    for platform in ("cpu", "default"):
        with monkeypatch.context() as patch:
            patch.setattr(
                codes.lax, "platform_dependent", lambda x, p=platform, **by: by[p](x)
            )
            digits = codes.unpack(packed, base, count)
        np.testing.assert_array_equal(digits.swapaxes(0, 1), places)
