"""Each function of ``_platform`` equals a plain reference, on every platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax._core import platform as _platform
from slamb_jax.exchange.codecs import CODECS
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
    barriers = _platform.computed_apart, _platform.recompute, _platform.opaque
    for barrier in (*barriers, _platform.materialized):
        x = jnp.arange(15.0)
        assert_same_bits(there(platform, barrier, x), x)


@on_each
@pytest.mark.parametrize("shape", [(7,), (24,), (900,), (1000,), (1, 24 * 6), (8, 128)])
def test_an_array_is_coded_in_groups(platform, shape, monkeypatch):
    """Of less than one, of one, of several at a time and their rest.

    Each is rounded with random bits of its own. Two arrays under ``vmap`` as well.
    """
    monkeypatch.setattr(_platform, "_CACHED", 5 * 24)
    x = jnp.arange(1, 1 + np.prod(shape), dtype=jnp.float32).reshape(shape)
    codec = CODECS["uniform4"]
    encode = functools.partial(codec.encode, seed=jnp.uint32(5))

    def in_groups(x):
        return codec.decode(*_platform.map_groups(encode, x, (2, 3, 4)))

    @jax.jit
    def at_once(x):
        groups = jnp.pad(x.reshape(-1), (0, -x.size % 24)).reshape(-1, 2, 3, 4)
        return codec.decode(*encode(groups))

    assert_close(there(platform, in_groups, x), at_once(x))
    both = jnp.stack([x, x + 1])
    got = there(platform, jax.vmap(in_groups), both)
    assert_close(got, jax.vmap(at_once)(both))


@on_each
@pytest.mark.parametrize(("base", "count"), [(3, 5), (16, 2), (2, 8)])
def test_a_byte_gives_back_its_digits(platform, base, count):
    """All bytes there are."""
    places = np.indices((base,) * count).reshape(count, -1)
    packed = (places * base ** np.arange(count)[:, None]).sum(0).astype(np.uint8)
    assert len(np.unique(packed)) == base**count

    split = lambda x: _platform.split_digits(x, base, count)  # noqa: E731
    digits = there(platform, split, packed.reshape(1, -1, 1))
    np.testing.assert_array_equal(digits[0, :, :, 0], places)


@on_each
def test_codes_are_decoded_and_summed(platform):
    codes = random_tree({"x": (7, 40)}, 0)["x"]
    for total in (_platform.sum_of_codes, _platform.sum_in_turn):
        got = there(platform, lambda x, total=total: total(jnp.square, x), codes)
        assert_close(got, jnp.square(codes).sum(0), units=8)


SLAMB = slamb_jax.slamb(
    0.1, plain(AXIS, min_size=0, sync_every=2), form="product", weight_decay=0.1
)


@pytest.mark.parametrize(
    ("tx", "programs"),
    [
        (SLAMB, 1),  # of a large leaf, in float32, which has no branch
        (slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS)), len(PLATFORMS)),
    ],
)
def test_a_step_lowers_for_every_platform(tx, programs):
    """With the branches of the platform, as jax chooses them."""
    like = stack({"w": np.zeros((64, 1280), np.float32)}, 2)
    state = jax.eval_shape(jax.vmap(tx.init), like)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS)).trace(like, state, like)
    lowered = [update.lower(lowering_platforms=(p,)).as_text() for p in PLATFORMS]
    assert len(set(lowered)) == programs
