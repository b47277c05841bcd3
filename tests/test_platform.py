"""Each function of ``_platform`` equals a plain reference, on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax._core import platform as _platform
from slamb_jax._core import platform_groups, platform_tiles
from slamb_jax._core.leaves import Leaf
from slamb_jax.exchange.codes import _RECIPROCALS
from slamb_jax.exchange.mean import mean_over_workers
from tests.close import assert_close, assert_same_bits
from tests.compiled import PLATFORMS, on_platform
from tests.optimizers import plain, random_tree
from tests.workers import AXIS, stack

on_each = pytest.mark.parametrize("platform", PLATFORMS)


def there(platform, fun, *args):
    """What the jitted function returns with the branches of a platform."""

    def run(*args):
        with on_platform(platform):
            return fun(*args)

    return jax.tree.map(np.asarray, jax.jit(run)(*args))


@on_each
def test_barriers_change_nothing(platform):
    apart, again, x = (
        _platform.computed_apart,
        _platform.recompute_barrier,
        jnp.arange(15.0),
    )
    for barrier in (again, apart, _platform.materialized):
        assert_same_bits(there(platform, barrier, x), x)


@on_each
@pytest.mark.parametrize(
    "shape", [(16, 256), (3, 8, 128), (12, 128), (2, 9, 256), (7, 128), (8,), ()]
)
def test_a_flat_array_has_all_elements_and_zeros(platform, shape):
    x = 1 + jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    size = platform_tiles.flat_size(shape) + 5
    flat = there(platform, lambda x: platform_tiles.flatten(x, size), x)
    assert flat.shape == (size,)
    np.testing.assert_array_equal(np.sort(flat)[size - x.size :], x.reshape(-1))
    if platform != "tpu":
        np.testing.assert_array_equal(flat[: x.size], x.reshape(-1))
    elif shape == (16, 256):  # a tile after the other
        np.testing.assert_array_equal(flat[:1024].reshape(8, 128), x[:8, :128])
    back = there(platform, lambda x: platform_tiles.unflatten(x, shape), flat)
    assert_same_bits(back, x)


@on_each
@pytest.mark.parametrize("shape", [(16, 256), (2, 9, 256), (256, 256)])
def test_groups_have_the_tiles_of_an_array(platform, shape):
    """Their planes, and the norms of their blocks, on which codes are computed."""
    x, planes = random_tree({"x": shape}, 0)["x"], 3
    count = -(-platform_tiles.flat_size(shape) // (planes * 1024))

    def parts(x):
        flat = platform_tiles.flatten(x, count * planes * 1024)
        groups = flat.reshape(count, planes, 8, 128)
        norms = platform_tiles.block_sizes(groups, x, jnp.maximum, jnp.max)
        return groups, platform_tiles.planes_of(groups, x), norms

    groups, got, norms = there(platform, parts, x)
    assert_same_bits(np.stack(got, 1), groups)
    assert_same_bits(norms, np.abs(groups).max((1, 3))[..., None])


@on_each
@pytest.mark.parametrize("shape", [(256, 256), (3, 100, 256), (65536,)])
def test_elements_are_the_same_by_tiles(platform, shape):
    x, y = random_tree({"x": shape, "y": shape}, 0).values()
    fun = lambda x, none, y: (x - y, x.astype(jnp.bfloat16))  # noqa: E731
    by_tiles = lambda x, y: platform_tiles.by_tiles(fun, (x, None), (y,))  # noqa: E731
    for got, want in zip(there(platform, by_tiles, x, y), fun(x, None, y), strict=True):
        assert_same_bits(got, want)


@on_each
@pytest.mark.parametrize("width", [128, 64])
def test_digits_are_kept(platform, width):
    digits = jnp.arange(4 * 3 * 8 * width, dtype=jnp.uint8).reshape(4, 3, 8, width)
    assert_same_bits(there(platform, platform_tiles.digits_by_tiles, digits), digits)


@on_each
@pytest.mark.parametrize("shape", [(7,), (24,), (900,), (1000,), (1, 24 * 6), (8, 128)])
def test_an_array_is_coded_in_groups(platform, shape, monkeypatch):
    """Of less than one, of one, of several at a time and their rest; every one once.

    Two arrays under ``vmap`` as well, where jax 0.7 loses updates at unsigned places.
    """
    monkeypatch.setattr(platform_groups, "_CACHED", 5 * 24)
    size = 24 * -(-np.prod(shape) // 24)
    x = jnp.arange(1, 1 + np.prod(shape), dtype=jnp.float32).reshape(shape)

    def code(groups, flat, first):
        assert len(groups) - 1 <= flat.size / 24 <= len(groups)
        return groups, first + jnp.arange(len(groups), dtype=jnp.uint32)

    def coded(x):
        return platform_groups.in_groups(code, x, (2, 3, 4))

    def want(x):
        return there(platform, lambda x: platform_tiles.flatten(x, size), x)

    groups, number = there(platform, coded, x)
    assert_same_bits(groups, want(x).reshape(-1, 2, 3, 4))
    np.testing.assert_array_equal(number, np.arange(len(groups)))
    both = jnp.stack([x, x + 1])
    groups, number = there(platform, jax.vmap(coded), both)
    assert_same_bits(groups, np.stack([want(x) for x in both]).reshape(2, -1, 2, 3, 4))
    np.testing.assert_array_equal(number, [np.arange(groups.shape[1])] * 2)


@on_each
@pytest.mark.parametrize("each", [(3, 1, 8, 1), (3, 2, 1, 1), (3, 2, 8, 1)], ids=str)
def test_every_row_has_its_own(platform, each):
    x = random_tree({"x": (3, 2, 8, 16)}, 0)["x"]
    each = random_tree({"x": each}, 1)["x"]
    got = there(platform, lambda *x: platform_groups.of_rows(jnp.multiply, *x), x, each)
    assert_same_bits(got, x * each)


reductions = pytest.mark.parametrize(
    ("two", "many"), [(jnp.add, jnp.sum), (jnp.maximum, jnp.max)], ids=["sum", "max"]
)


@on_each
@reductions
@pytest.mark.parametrize("width", [1, 24, 33, 128])
def test_blocks_are_reduced(platform, width, two, many):
    planes = random_tree({"x": (2, 3, width)}, 0, 5)["x"]
    got = there(platform, lambda x: _platform.reduce_blocks(list(x), two, many), planes)
    assert_close(got, many(planes, (0, -1))[..., None], units=8)


@on_each
@reductions
@pytest.mark.parametrize("size", [4 * 6 * 128, 3 * 6 * 128 + 256, 3 * 6 * 128 + 5])
def test_blocks_have_the_norm_of_their_magnitudes(platform, size, two, many):
    """Whether the array fills its groups, its rows, or neither."""
    flat = random_tree({"x": (size,)}, 0)["x"]
    groups = jnp.pad(flat, (0, 4 * 6 * 128 - size)).reshape(4, 3, 2, 128)
    norms = lambda *x: platform_tiles.block_sizes(*x, two, many)  # noqa: E731
    got = there(platform, norms, groups, flat)
    assert_close(got, many(jnp.abs(groups), (1, 3))[..., None], units=8)


@on_each
@pytest.mark.parametrize(("base", "count"), [(3, 5), (16, 2)])
def test_a_byte_gives_back_its_digits(platform, base, count):
    """All bytes there are."""
    places = np.indices((base,) * count).reshape(count, -1)
    packed = (places * base ** np.arange(count)[:, None]).sum(0).astype(np.uint8)
    assert len(np.unique(packed)) == base**count

    given = base, count, _RECIPROCALS[base]
    split = lambda x: _platform.split_digits(x, *given)  # noqa: E731
    digits = there(platform, split, packed.reshape(1, -1, 1))
    np.testing.assert_array_equal(digits[0, :, :, 0], places)


@on_each
def test_rows_are_decoded_and_summed(platform):
    rows = random_tree({"x": (7, 40)}, 0)["x"]
    got = there(platform, lambda x: _platform.sum_of_rows(jnp.square, x), rows)
    assert_close(got, jnp.square(rows).sum(0), units=8)


@on_each
def test_codes_are_those_of_the_flat_array(platform):
    """On a TPU in the order of tiles, and else in that of rows."""
    exchange, shape = slamb_jax.Exchange(AXIS), (512, 256)

    def mean(x):
        leaf, step = Leaf(0, x.shape), jnp.int32(1)
        return mean_over_workers([x], [leaf], exchange, "ternary", step).means[0]

    def of_flat(x):
        return platform_tiles.unflatten(mean(platform_tiles.flatten(x, x.size)), shape)

    x, over = random_tree({"w": shape}, 0, 2)["w"], {"axis_name": AXIS}
    got, want = (there(platform, jax.vmap(f, **over), x) for f in (mean, of_flat))
    assert_close(got, want, units=8)


SLAMB = slamb_jax.slamb(
    0.1, plain(AXIS, min_size=0, sync_every=2), form="product", weight_decay=0.1
)


def test_a_step_of_slamb_is_the_same_on_every_platform():
    """Gathers, scatters and directions, each where it is used."""
    shapes = {"w": (64, 1280), "b": (64,), "odd": (30, 21)}

    def steps(grads, params):
        _, state = SLAMB.update(grads, SLAMB.init(params), params)
        return SLAMB.update(grads, state, params)

    run = jax.vmap(steps, axis_name=AXIS)
    given = random_tree(shapes, 1, 2), stack(random_tree(shapes, 9), 2)
    of_cpu, *others = (there(platform, run, *given) for platform in PLATFORMS)
    for got in others:
        assert_close(got, of_cpu, units=512)


@pytest.mark.parametrize("tx", [SLAMB, slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS))])
def test_a_step_lowers_for_every_platform(tx):
    """With the branches of the platform, as jax chooses them."""
    like = stack({"w": np.zeros((64, 1280), np.float32)}, 2)
    state = jax.eval_shape(jax.vmap(tx.init), like)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS)).trace(like, state, like)
    lowered = [update.lower(lowering_platforms=(p,)).as_text() for p in PLATFORMS]
    assert len(set(lowered)) == len(PLATFORMS)
