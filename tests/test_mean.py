"""Means over the workers: of codes, of 16 bits and of 32, and what rounding took."""

import functools
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._core.leaves import leaves_of
from slamb_jax._core.rounding import round_to
from slamb_jax.exchange.codecs import CODECS
from slamb_jax.exchange.mean import mean_over_workers
from tests.close import assert_close, assert_same_bits, assert_workers_agree
from tests.naive import DRAWN, coded, grid, in_blocks
from tests.optimizers import descend, random_tree, standard_promotion
from tests.workers import AXIS, MAPPINGS, P, mesh_of, over_workers, stack

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
    leaves = leaves_of(tree)
    found = mean_over_workers(arrays, leaves, between, payload, jnp.int32(step))
    # None where nothing is rounded.
    trees = (treedef.unflatten(x) if jax.tree.leaves(x) else None for x in found[:3])
    return type(found)(*trees)


def on_workers(payload, tree, mapping="vmap", step=7, route="owners"):
    """By ``groups``: of pairs of devices, of which each exchanges a slice."""
    n = len(jax.tree.leaves(tree)[0])
    run = functools.partial(exchanged, payload, route=route)
    if mapping == "groups":
        run = functools.partial(run, step=step, local_axis_name="device")
        twice = jax.vmap(run, axis_name="device", axis_size=2, in_axes=None)
        found = jax.jit(jax.vmap(twice, axis_name=AXIS))(tree)
        both = jax.tree.map(lambda x: x.swapaxes(0, 1), found.means)
        assert_workers_agree(both)
        return jax.tree.map(lambda x: np.asarray(x[:, 0]), found)
    run = over_workers(functools.partial(run, step=step), mapping, n)
    return jax.tree.map(np.asarray, run(tree))


def assert_rounded(payload, x, y):
    """``y`` is ``x`` as it arrives."""
    if payload == "bfloat16":
        assert_same_bits(y, x.astype("bfloat16").astype(np.float32))
        return
    group = CODECS[payload].group_of(x.size)
    if payload in DRAWN:  # to less than a step of its grid
        step = 1.0001 * grid(payload, x.ravel(), group)
        assert (np.abs(y - x).ravel() <= step).all()
    else:
        assert_close(y.ravel(), coded(payload, x.ravel(), group))


@pytest.mark.parametrize(
    ("payload", "mapping", "n", "route"),
    [(payload, "vmap", N, "owners") for payload in (*PAYLOADS, "sign")]
    + [("ternary", "shard_map", 3, "owners"), ("bfloat16", "shard_map", N, "owners")]
    + [(x, "groups", N, "owners") for x in ("ternary", "uniform8", "bfloat16", None)]
    + [("ternary", "vmap", n, route) for n, route in ((2, "owners"), (3, "all"))]
    + [("largest_of_31", "vmap", 8, "owners")],
)
def test_the_mean_of_what_was_sent_is_sent_again(payload, mapping, n, route):
    """No block is of two arrays, and what each rounding takes is known."""
    tree = jax.tree.map(np.asarray, random_tree(SHAPES, 5, n))
    means, sent, lost, _ = on_workers(payload, tree, mapping, route=route)
    assert_workers_agree(means)
    is_direct = n == 2 or route == "all"  # all decode all codes, and encode no mean
    assert (sent is None) == (payload is None)
    assert (lost is None) == (payload is None or is_direct)
    for name, x in tree.items():
        mean = means[name][0]
        if sent is None:
            assert_close(mean, x.mean(0))
            continue
        for own, arrived in zip(x, sent[name], strict=True):
            assert_rounded(payload, own, arrived)
        of_sent = sent[name].mean(0, dtype=np.float64)
        if lost is None:
            assert_close(mean, of_sent)
            continue
        assert_close(mean + lost[name].mean(0), of_sent)
        assert (lost[name] != 0).sum(0).max(initial=0) <= 1  # a part has one owner
        if payload != "bfloat16":  # which the order of the sum may tip
            assert_rounded(payload, of_sent, mean)


@pytest.mark.parametrize("payload", DRAWN)
def test_workers_steps_arrays_and_blocks_round_otherwise(payload):
    between = np.where(np.arange(5000) % 32, 0.65, 1.0).astype(np.float32)
    same = {"few": np.stack([between[:500]] * N), "more": np.stack([between] * N)}
    one, again, later = (on_workers(payload, same, step=t).sent for t in (7, 7, 8))
    assert_same_bits(one, again)
    first, other = one["few"][:2]
    blocks = in_blocks(one["more"][0], CODECS[payload].group_of(5000))
    pairs = [(first, x) for x in (other, later["few"][0], one["more"][0, :500])]
    for a, b in (*pairs, blocks[:2]):
        assert (a != b).mean() > 0.2


@pytest.mark.parametrize("payload", ["ternary", "uniform4", "bfloat16", None])
def test_what_is_not_finite_reaches_all(payload):
    x = random_tree({"x": (N, 400)}, 0)["x"].at[2, 37].set(jnp.inf)
    assert not np.isfinite(on_workers(payload, x).means[:, 37]).any()


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


LEAVES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def every(steps, payload=None, compressor=None, **settings):
    exchange = slamb_jax.Exchange(AXIS, payload=payload, sync_every=steps, **settings)
    return slamb_jax.average_parameters_every(exchange, compressor=compressor)


HALF = slamb_jax.compress_with_error_feedback(slamb_jax.compressors.top_k(0.5, AXIS))


def test_a_missing_gradient_moves_nothing():
    tx, params = every(1, "uniform8", outer=NESTEROV), random_tree(LEAVES, 0)
    run = over_workers(tx.update, "vmap", 2)
    with standard_promotion():
        u, state = run(*stack((params | {"w": None}, tx.init(params), params), 2))
    assert u["w"] is None
    np.testing.assert_array_equal(state.anchor["w"][0], params["w"])


@pytest.mark.parametrize(
    ("tx", "mapping"),
    [
        (every(2), "shard_map"),
        (every(2, "uniform8", outer=NESTEROV), "shard_map"),
        (every(2, "uniform4", outer=optax.sgd(1.0)), "vmap"),
        (every(2, compressor=HALF, outer=optax.sgd(1.0)), "shard_map"),
    ],
)
def test_local_steps_end_at_the_minimum_of_the_mean(tx, mapping):
    """A state that is made on the workers keeps its types."""
    tx = optax.chain(optax.sgd(optax.linear_schedule(0.3, 0.0, 200)), tx)
    toward = lambda p, own, t: jax.tree.map(lambda x: x - own, p)  # noqa: E731
    targets = 1.0 + np.arange(N, dtype="f")
    params = descend(tx, toward, random_tree(LEAVES, 0), targets, 200, mapping)
    for x in jax.tree.leaves(params):
        np.testing.assert_allclose(x.mean(0), 2.5, atol=0.02)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "bfloat16"),
        ({"outer": NESTEROV}, "bfloat16"),
        ({"outer": NESTEROV, "payload": "uniform8"}, "float32"),
        ({"outer": NESTEROV, "compressor": HALF}, "float32"),
    ],
)
def test_an_infinite_constant_stays_as_it_is(settings, dtype):
    """As a mask of -inf among the parameters, whose gradient is 0."""
    tx = every(2, **settings)
    mask = jnp.array([-jnp.inf, jnp.inf, 0.0], dtype)
    move = lambda p, own, t: {"mask": jnp.zeros_like(mask), "w": own}  # noqa: E731
    own = jnp.arange(2.0 * 3).reshape(2, 3)
    trained = descend(tx, move, {"mask": mask, "w": jnp.ones(3)}, own, 5)
    np.testing.assert_array_equal(trained["mask"], [mask] * 2)
    assert jnp.isfinite(trained["w"]).all()
