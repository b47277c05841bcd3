"""Codes: those of the formula, of the bytes announced, right on average."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slamb_jax._core.rounding import hash_u32
from slamb_jax.exchange.codecs import CODECS, cut_among
from tests.close import assert_close
from tests.naive import COUNTS, DRAWN, coded, grid, in_blocks

each = pytest.mark.parametrize("payload", [*COUNTS, *DRAWN, "sign"])
SIZES = 300, 5000, 2**16 + 300  # of each kind of block


def draws(size, seed=0):
    """Of many sizes, zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * np.exp(rng.normal(size=size))
    x[::17] = 0.0
    return x.astype(np.float32)


def group_of(payload, size):
    return CODECS[payload].group_of(size)


@functools.cache
def there_and_back(payload, size):
    codec, group = CODECS[payload], group_of(payload, size)

    def run(x, seed):
        x = jnp.pad(x, (0, -size % group.size)).reshape(-1, *group[1:])
        return codec.decode(*codec.encode(x, seed=seed)).reshape(-1)[:size]

    return jax.jit(run)


def sent(payload, x, seed=5):
    return np.asarray(there_and_back(payload, x.size)(jnp.asarray(x), jnp.uint32(seed)))


def assert_beside(x, y, step):
    """Each is one of the two points of its grid beside it."""
    assert (np.abs(y - x) <= 1.0001 * step).all()
    np.testing.assert_allclose(y / step, np.round(y / step), atol=1e-3)


def assert_drawn(x, y, step):
    """Many draws of each: points of the grid beside it, right on average."""
    assert_beside(x, y, step)
    error, deviation = y.mean(0, dtype=np.float64) - x, y.std(0, dtype=np.float64)
    random = deviation > 0.1 * step  # else few fell to one side
    assert random.sum() > 200
    z = error[random] / deviation[random] * len(y) ** 0.5
    assert np.abs(z).max() < 4.5
    assert 0.8 < np.sqrt(np.mean(z**2)) < 1.2  # as by chance, no better and no worse
    assert (np.abs(error) / step)[~random].max() < 0.01


BY_SIZE = ("ternary", "largest_of_7", "sign", *DRAWN)


@pytest.mark.parametrize(
    ("payload", "size"),  # each payload, and some of them at all sizes
    [(x, size) for x in BY_SIZE for size in SIZES]
    + [(x, SIZES[i % 3]) for i, x in enumerate(COUNTS) if x not in BY_SIZE],
)
def test_codes_are_those_of_the_formula(payload, size):
    """Of equal magnitudes, as in Adam's first step, and in every step of Lion, too."""
    x, group = draws(size), group_of(payload, size)
    if payload in DRAWN:
        assert_beside(x, sent(payload, x), grid(payload, x, group))
        return
    for y in (x, *(np.copysign(np.float32(size), x) for size in (0.1, 1e-30, 1e30))):
        assert_close(sent(payload, y), coded(payload, y, group))


@pytest.mark.parametrize("payload", DRAWN)
def test_right_on_average(payload):
    x, seeds = draws(600), hash_u32(jnp.arange(6000, dtype=jnp.uint32), 12345)
    y = np.asarray(jax.vmap(there_and_back(payload, x.size), (None, 0))(x, seeds))
    assert_drawn(x, y, grid(payload, x, group_of(payload, x.size)))


@each
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [5000, 2**16])
def test_a_block_that_is_not_finite_is_decoded_as_not_finite(payload, bad, size):
    """Of many rows, too, where XLA's maximum lost a NaN on a CPU."""
    group = group_of(payload, size)
    x = draws(-(-size // group.size) * group.size)
    where = in_blocks(np.arange(x.size) == 200, group).any((1, 2))
    x[200] = bad
    y = sent(payload, x)
    assert where.sum() == 1
    assert not np.isfinite(y[200])
    assert np.isfinite(in_blocks(y, group)[~where]).all()


@each
def test_zeros_stay_and_extremes_are_finite(payload):
    for size in (0.0, 1.0, 1e35, 1e-30, 1e-37, 1e-42):
        x = draws(300) / 40 * np.float32(size)
        y = sent(payload, x)
        assert payload == "sign" or (y[x == 0] == 0).all()
        chex.assert_tree_all_finite(y)
        assert np.abs(y).max() <= 2 * np.abs(x).max() + 1e-35 * (size > 0)


BITS_SENT = {  # of an element of a large array, with its share of a scale
    "ternary": 8 / 5 + 32 / 640, "uniform8": 8 + 32 / 256, "uniform4": 4 + 32 / 256,
    "sign": 1 + 32 / 1024,
    "largest_of_2": 4 / 2 + 32 / 512, "largest_of_7": 4 / 7 + 32 / 1792,
    "largest_of_31": 8 / 31 + 32 / 3968, "largest_of_127": 8 / 127 + 32 / 16256,
}  # fmt: skip


@pytest.mark.parametrize(("payload", "bits"), BITS_SENT.items())
def test_bytes_are_those_announced(payload, bits):
    codec = CODECS[payload]
    sizes = (codec.group_of(size).size for size in (2**11 - 1, 2**16 - 1, 2**16))
    small, middling, large = sizes  # so that little of small arrays is padding
    assert 8 * 4 * small == 8 * 2 * middling == large
    for size in (1, 639, 641, 10_000, 100_003, 3 * 2**22):
        group = codec.group_of(size)
        shape = group._replace(groups=-(-size // group.size))
        x, seed = (jax.ShapeDtypeStruct(s, t) for s, t in ((shape, "f4"), ((), "u4")))
        codes = jax.eval_shape(lambda x, s: codec.encode(x, seed=s), x, seed)
        assert {y.dtype.name for y in codes} == {"uint8"}
        assert sum(y.size for y in codes) == codec.nbytes(shape)
    assert (group.rows, group.width) == (8, 128)
    assert codec.nbytes(shape) == pytest.approx(size * bits / 8, rel=0.01)


@each
@pytest.mark.parametrize("owners", [1, 2, 3, 8, 64])
def test_every_array_is_in_one_cut_and_little_is_padded(payload, owners):
    sizes = [0, 7, 1, 640, 5119, 70_001, 2**22 + 1]
    cuts = cut_among(sizes, CODECS[payload], owners)
    assert sorted(i for cut in cuts for i in cut.members) == [1, 2, 3, 4, 5, 6]
    for group, own, members in cuts:
        rows = group.rows * sum(-(-sizes[i] // group.size) for i in members)
        # Less than a row, or where slices are long a group of 1 %, for each owner.
        room = owners if own.groups == 1 else 0.02 * rows + owners
        assert 0 <= owners * own.groups * own.rows - rows < room
        assert own.groups == 1 or own.rows == group.rows
