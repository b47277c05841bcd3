"""Compressors: nothing is lost, all workers get the same mean, bytes are the codes'."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from benchmarks.rivals.parts import terngrad
from slamb_jax import compressors, selections
from tests.close import assert_close, assert_same_bits, assert_workers_agree
from tests.optimizers import gradients, random_tree
from tests.workers import AXIS, over_workers, stack

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "deep": (2, 5, 6), "one": ()}
ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def halves(x, common, own):
    """A code of three dtypes, with random bits of its own and of all."""
    up = jax.random.bernoulli(own, 0.5, x.shape)
    shift = jax.random.uniform(common, x.shape)
    places = jnp.arange(x.size, dtype=jnp.int16)
    return {"up": up, "x": (x + shift).astype(jnp.bfloat16), "places": places}


def whole(code, like, common):
    shift = jax.random.uniform(common, like.shape)
    x = code["x"].reshape(-1)[code["places"].astype(jnp.int32)].reshape(like.shape)
    return x.astype(jnp.float32) - shift + 0.001 * code["up"].astype(jnp.float32)


def random_k(share):
    """Random places of each array, the same ones on all workers."""

    def places(x, common):
        drawn = jax.random.permutation(common, x.size)[: round(share * x.size)]
        return jnp.unravel_index(drawn, x.shape)

    def encode(x, common, own):
        return x[places(x, common)]

    def decode(code, like, common):
        return jnp.zeros(like.shape).at[places(like, common)].set(code)

    return compressors.from_codec(compressors.Codec(encode, decode, True), AXIS)


def of(**settings):
    return compressors.of_exchange(slamb_jax.Exchange(AXIS, **settings))


TURNS = selections.Strided(0.25, min_size=4)
ALL = {
    "top k": compressors.top_k(0.2, AXIS),
    "random k": random_k(0.2),
    "low rank": compressors.low_rank(2, AXIS),
    "a user's": compressors.from_codec(compressors.Codec(halves, whole), AXIS),
    "signs": of(payload="sign"),
    "TernGrad": compressors.from_codec(terngrad(), AXIS),
    "by turns": of(payload=None, selection=TURNS),
    "few bits by turns": of(payload="ternary", selection=TURNS),
    "uniform8": of(payload="uniform8"),
    "bfloat16": of(payload="bfloat16"),
}


def sent_by(compressor, x, steps=1, mapping="vmap"):
    """What every worker gets at the last step, and its state."""
    state = stack(jax.jit(compressor.init)(ZEROS), N)
    update = over_workers(compressor.update, mapping, N)
    for _ in range(steps):
        sent, state = update(x, state)
    return sent, state


def feedback_around(compressor, decay=1.0):
    """The link's update on all workers, and its first state."""
    tx = slamb_jax.compress_with_error_feedback(compressor, decay=decay)
    return over_workers(tx.update, "vmap", N), stack(tx.init(ZEROS), N)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_lost_and_all_workers_get_the_same_mean(name):
    """On a mesh as under ``vmap``."""
    x = random_tree(SHAPES, 1, N)
    sent, state = sent_by(ALL[name], x, steps=3)
    on_mesh, _ = sent_by(ALL[name], x, 3, "shard_map")
    assert_close(on_mesh, sent, units=256, floor=1.0)
    assert_workers_agree(sent.mean)
    assert_workers_agree(state)
    for key in SHAPES:
        given, mean, unsent = (np.float64(t[key]) for t in (x, *sent))
        room = 1e-5 * (1 + np.abs(given).max())
        np.testing.assert_allclose(
            mean[0] + unsent.mean(0), given.mean(0), atol=room, rtol=0
        )


def test_what_fills_up_a_long_slice_of_signs_is_not_in_the_mean():
    x = jnp.ones((N, 2_200_001)).at[0].set(-1.0)
    sent, _ = sent_by(ALL["signs"], {"w": x})
    assert_same_bits(sent.mean["w"], jnp.full(x.shape, 0.5))


def test_random_k_draws_others_at_each_step_and_for_each_array():
    ones = stack({"w": jnp.ones(400), "other": jnp.ones(400)}, N)
    runs = [sent_by(ALL["random k"], ones, steps)[0].mean for steps in (1, 2)]
    masks = [np.asarray(x[0]) for x in jax.tree.leaves(runs)]
    assert [int(mask.sum()) for mask in masks] == [80] * 4
    shared = [(a * b).sum() for i, a in enumerate(masks) for b in masks[:i]]
    assert max(shared) < 40  # of 80; 16 by chance, with a deviation of 3.2


def test_the_residual_is_that_of_the_recurrence():
    """With what 16 bits cannot hold; none is kept if nothing of it is sent later."""
    assert feedback_around(ALL["top k"], decay=0.0)[1].residual is None
    update, state = feedback_around(ALL["top k"], decay=0.5)
    narrowed = functools.partial(jax.tree.map, lambda x: x.astype("bfloat16"))
    e = dict.fromkeys(ZEROS, 0.0)
    for g in map(narrowed, gradients(4, SHAPES, N)):
        x = jax.tree.map(lambda g, e: g.astype("float32") + 0.5 * e, g, e)
        sent, _ = sent_by(ALL["top k"], narrowed(x))
        updates, state = update(g, state)
        assert_close(updates, narrowed(sent.mean), units=2)
        e = sent.unsent
        for wide, rounded in ((x, narrowed(x)), (sent.mean, updates)):
            lost = jax.tree.map(lambda x, y: x - y.astype("float32"), wide, rounded)
            e = jax.tree.map(jnp.add, e, lost)
        assert_close(state.residual, e, floor=1.0)


@pytest.mark.parametrize("name", ["top k", "low rank", "signs"])
def test_what_is_beyond_the_range_of_a_gradient_waits(name):
    """Nothing is lost, and nothing becomes infinite."""
    (update, state), steps = feedback_around(ALL[name]), 20
    sizes = np.random.default_rng(0)
    g = {k: np.float16(sizes.uniform(1e4, 6e4, x.shape)) for k, x in ZEROS.items()}
    g = stack(g, N)
    total = jax.tree.map(np.float64, ZEROS)
    for _ in range(steps):
        updates, state = update(g, state)
        total = jax.tree.map(lambda t, u: t + np.float64(u[0]), total, updates)
    for key, x in total.items():
        kept = np.float64(state.residual[key]).mean(0)
        given = steps * np.float64(g[key][0])
        np.testing.assert_allclose(x + kept, given, rtol=1e-2 / steps)


def test_an_infinite_gradient_is_sent_as_one():
    update, state = feedback_around(ALL["top k"])
    g = jax.tree.map(lambda x: x.astype("float16"), stack(ZEROS, N))
    updates, _ = update(g | {"b": g["b"].at[0, 3].set(jnp.inf)}, state)
    assert not jnp.isfinite(updates["b"][:, 3]).any()


def test_a_gradient_that_is_none_does_not_shift_the_others():
    update, state = feedback_around(ALL["random k"])
    x, params = random_tree(SHAPES, 1, N), stack(ZEROS, N)
    full, kept = update(x, state, params)
    part, left = update(x | {"b": None}, state, params)
    assert_same_bits(part, full | {"b": None})
    assert_same_bits(left.residual, kept.residual | {"b": state.residual["b"]})


@pytest.mark.parametrize(
    ("dtype", "mapping"),
    [(x, "shard_map") for x in ("int4", "float8_e4m3fn", "uint16", "complex64")]
    + [(x, "vmap") for x in ("uint4", "int8", "complex64")],
)
def test_codes_of_any_dtype_arrive_as_they_were_sent(dtype, mapping):
    codec = compressors.Codec(
        lambda x, common, own: x.astype(jnp.float32).astype(dtype),
        lambda code, like, common: jnp.real(code).astype(jnp.float32),
    )
    x = {"w": jnp.asarray(np.arange(N * 15).reshape(N, 3, 5) % 4, jnp.float32)}
    x |= {"one": jnp.asarray([1.0, 2.0, 3.0, 0.0])}
    sent, _ = sent_by(compressors.from_codec(codec, AXIS), x, mapping=mapping)
    means = jax.tree.map(lambda x: x.mean(0), x)
    assert_same_bits(jax.tree.map(lambda x: x[-1], sent.mean), means)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_narrow_decode_is_widened_before_it_is_summed(dtype):
    codec = compressors.Codec(
        lambda x, *keys: x, lambda code, like, key: code.astype(dtype)
    )
    x = {"w": jnp.full((N, 2), 1.0).at[0].set(100.0)}
    sent, _ = sent_by(compressors.from_codec(codec, AXIS), x)
    assert_same_bits(sent.mean["w"], jnp.full((N, 2), 103 / 4))


SIZES = {"w": (40, 50), "b": (50,)}
FOUR_BITS = compressors.Codec(
    lambda x, common, own: x.astype(jnp.int4),
    lambda code, like, common: code.astype(jnp.float32),
)
FOUR_BITS = {"four bits": compressors.from_codec(FOUR_BITS, AXIS)}
D, K = 2050, 400 + 10


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("random k", 2 * (N - 1) / N * 4 * K),
        ("a user's", (N - 1) * (4 * D + -(-2000 // 8) + -(-50 // 8))),
        ("four bits", (N - 1) * D / 2),  # two share a byte
    ],
)
def test_the_wire_report_has_the_bytes_of_the_codes(name, nbytes):
    params = random_tree(SIZES, 0)
    tx = slamb_jax.compress_with_error_feedback((ALL | FOUR_BITS)[name])
    update = over_workers(tx.update, "shard_map_unchecked", N)
    lowered = update.lower(*(stack(x, N) for x in (params, tx.init(params))))
    report = slamb_jax.wire_report(lowered.compile())
    assert report.bytes_sent() == pytest.approx(nbytes)
