"""Means over the workers: of codes, of 16 bits and of 32, and what rounding took."""

import functools
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax._core.leaves import leaves_of
from slamb_jax._core.rounding import round_to
from slamb_jax.exchange.codecs import codec_of
from slamb_jax.exchange.mean import mean_over_workers
from tests.close import assert_close, assert_same_bits, assert_workers_agree
from tests.naive import DRAWN, coded, grid
from tests.optimizers import random_tree
from tests.workers import AXIS, MAPPINGS, P, mesh_of, over_workers

N = 4
SHAPES = {
    "large": (301, 219), "middling": (9, 300), "small": (3, 7), "empty": (0, 3), "s": ()
}  # fmt: skip
# Held to SSE4.2, XLA has no instruction that rounds to float16, and no function either.
SSE = "max_isa=SSE4_2" in os.environ.get("XLA_FLAGS", "")
DTYPES = ("float32", "bfloat16", *([] if SSE else ["float16"]))
PAYLOADS = ("ternary", "largest_of_7", "uniform8", "uniform4", "bfloat16", None)


def exchanged(payload, tree, step=7, **axes):
    """``Means`` of one worker's arrays, as trees."""
    between = slamb_jax.Exchange(AXIS, payload=payload, **axes)
    arrays, treedef = jax.tree.flatten(tree)
    found = mean_over_workers(
        arrays, leaves_of(tree), between, payload, jnp.int32(step), with_errors=True
    )
    return type(found)(*(None if x is None else treedef.unflatten(x) for x in found))


def on_workers(payload, tree, mapping="vmap", step=7):
    n = len(jax.tree.leaves(tree)[0])
    run = over_workers(lambda x: exchanged(payload, x, step), mapping, n)
    return jax.tree.map(np.asarray, run(tree))


@pytest.mark.parametrize(
    ("payload", "n"),  # of 3 workers no slice is full
    [("ternary", 2), ("ternary", 3), ("largest_of_7", 3), ("largest_of_31", 8)],
)
def test_it_is_the_code_of_the_mean_of_codes(payload, n):
    tree = random_tree(SHAPES, 3, n)
    means, sent, lost = on_workers(payload, tree)
    assert_workers_agree(means)
    assert (lost is None) == (n == 2)  # both decode all codes, and encode no mean
    for name, x in tree.items():
        group = codec_of(payload).group_of(x[0].size)
        want = np.stack([coded(payload, np.asarray(own).ravel(), group) for own in x])
        assert_close(sent[name].reshape(n, -1), want)
        mean = want.mean(0) if n == 2 else coded(payload, want.mean(0), group)
        assert_close(means[name][0].ravel(), mean)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_what_was_sent_is_the_mean_and_what_rounding_took_of_it(payload, mapping):
    tree = jax.tree.map(np.asarray, random_tree(SHAPES, 5, N))
    means, sent, lost = on_workers(payload, tree, mapping)
    assert_workers_agree(means)
    assert (sent is None) == (payload is None)
    assert (lost is None) == (payload is None)
    for name, x in tree.items():
        mean = means[name][0]
        if sent is None:
            assert_close(mean, x.mean(0))
        else:
            if payload == "bfloat16":
                assert_same_bits(sent[name], x.astype("bfloat16").astype(np.float32))
            assert_close(sent[name].mean(0), mean + lost[name].mean(0))
            assert (lost[name] != 0).sum(0).max(initial=0) <= 1  # a part has one owner
        if payload in DRAWN:  # each rounding is of less than a step of its grid
            given = [*x, sent[name].mean(0)]
            errors = [*(sent[name] - x), lost[name].mean(0)]
            for y, error in zip(given, errors, strict=True):
                group = codec_of(payload).group_of(y.size)
                step = 1.0001 * grid(payload, y.ravel(), group)
                assert (np.abs(error).ravel() <= step).all()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_groups_of_devices_find_what_single_devices_find(payload):
    """Each device exchanges a slice; all devices of a worker hold the same arrays."""
    tree = random_tree(SHAPES, 6, N)
    run = functools.partial(exchanged, payload, local_axis_name="device")
    twice = jax.vmap(run, axis_name="device", axis_size=2, in_axes=None)
    found = jax.jit(jax.vmap(twice, axis_name=AXIS))(tree)
    assert_workers_agree(
        jax.tree.map(lambda x: x.reshape(2 * N, *x.shape[2:]), found.means)
    )
    means, sent, lost = jax.tree.map(lambda x: x[:, 0], found)
    if payload not in DRAWN:  # which draw for each device
        alone = on_workers(payload, tree)
        assert_close((means, sent), (alone.means, alone.sent), units=8)
    if lost is not None:
        got = jax.tree.map(lambda x, y: np.mean(x + y, 0), means, lost)
        assert_close(got, jax.tree.map(lambda x: x.mean(0), sent))


@pytest.mark.parametrize("payload", ["uniform8", "ternary"])
def test_arrays_of_all_sizes_are_sent_in_one_exchange(payload):
    run = jax.make_jaxpr(functools.partial(exchanged, payload), axis_env=[(AXIS, N)])
    text = str(run(random_tree(SHAPES, 5)))
    assert text.count("all_to_all[") == text.count("all_gather[") == 1


@pytest.mark.parametrize("payload", DRAWN)
def test_workers_steps_and_arrays_round_otherwise(payload):
    between = np.where(np.arange(5000) % 32, 0.65, 1.0).astype(np.float32)
    same = {"few": np.stack([between[:500]] * N), "more": np.stack([between] * N)}
    one, again, later = (on_workers(payload, same, step=t).sent for t in (7, 7, 8))
    assert_same_bits(one, again)
    first, other = one["few"][:2]
    for x in (other, later["few"][0], one["more"][0, :500]):
        assert (first != x).mean() > 0.2


@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_is_not_finite_reaches_all(payload):
    x = random_tree({"x": (N, 400)}, 0)["x"].at[2, 37].set(jnp.inf)
    assert not np.isfinite(on_workers(payload, x).means[:, 37]).any()


@pytest.mark.parametrize("payload", ["ternary", "largest_of_7"])
def test_no_block_is_of_two_leaves(payload):
    """A leaf that is a thousand times smaller than those beside it is sent, too."""
    tree = random_tree({"a": (40, 60), "b": (60,), "c": (3,), "d": (50, 70)}, 1, N)
    small = functools.partial(
        jax.tree.map, jnp.multiply, {"a": 1.0, "b": 1e-3, "c": 1.0, "d": 1e-3}
    )
    want = small(on_workers(payload, tree).means)
    assert_close(on_workers(payload, small(tree)).means, want, units=8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_round_to_is_a_cast_that_stays(dtype):
    spread = np.exp(np.random.default_rng(0).uniform(-85, 85, 20_000))
    signs = np.random.default_rng(1).choice([-1, 1], 20_000)
    edges = [np.nan, np.inf, 0.0, -0.0, 2**-24, 2**-25, 6.1e-5, 65519, 65520, 1e-39]
    x = jnp.asarray(np.concatenate([signs * spread, edges]), jnp.float32)
    got, want = jax.jit(round_to, static_argnums=1)(x, dtype), x.astype(dtype)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (got, want)))
    # No compiler may leave it out, as it may a cast there and back.
    explicit = "reduce_precision" in str(jax.make_jaxpr(round_to, (1,))(x, dtype))
    assert explicit == (dtype != "float32")


@pytest.mark.parametrize(
    ("n", "mapping", "axis"),
    [(n, "vmap", AXIS) for n in (2, 3, 17)]
    + [(8, mapping, AXIS) for mapping in MAPPINGS]
    + [(8, m, ("node", "device")) for m in ("shard_map", "shard_map_unchecked")],
)
def test_parameters_are_averaged_to_the_same_bits_and_rounded_once(n, mapping, axis):
    xs = random_tree({"large": (33, 7), "small": (5,)}, n, n, scale=1e3)
    params = {x: jax.tree.map(lambda y, x=x: y.astype(x), xs) for x in DTYPES}
    others = {"empty": jnp.zeros((n, 0, 2)), "count": jnp.arange(n)}
    mean = functools.partial(slamb_jax.average_parameters, axis_name=axis)
    out = over_workers(mean, mapping, n, axis)(params | others)
    assert_same_bits(out.pop("count"), others["count"])  # as it is
    assert_workers_agree(out)
    for dtype, x in params.items():
        want = jax.tree.map(lambda y: np.asarray(y, np.float64).mean(0), x)
        got = jax.tree.map(lambda y: y[0], out[dtype])
        assert {y.dtype.name for y in jax.tree.leaves(got)} == {dtype}
        if dtype == "float32":
            assert_close(got, want, units=8)
        else:  # to a unit in the last place: the order of the sum may tip it
            chex.assert_trees_all_close(got, want, rtol=jnp.finfo(dtype).eps)


def test_a_mean_over_one_worker_does_not_vary():
    mean = functools.partial(slamb_jax.average_parameters, axis_name=AXIS)
    run = jax.shard_map(mean, mesh=mesh_of(1), in_specs=P(AXIS), out_specs=P())
    assert (np.asarray(jax.jit(run)(jnp.ones((1, 3)))) == 1).all()
