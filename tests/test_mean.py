"""Means over the workers: of codes, of 16 bits and of 32, and what rounding took."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._bytes import slice_nbytes
from slamb_jax._codes import quantizer_of
from slamb_jax._collectives import pmean
from slamb_jax._leaves import leaves_of
from slamb_jax._mean import mean_over_workers
from slamb_jax._rounding import round_to
from tests.close import assert_close, assert_same_bits
from tests.compiled import report_of
from tests.naive_codes import coded, grid
from tests.optimizers import random_tree
from tests.workers import AXIS, P, mesh_of, over_workers

N = 4
SHAPES = {
    "large": (301, 219),
    "middling": (9, 300),
    "small": (3, 7),
    "empty": (0, 3),
    "scale": (),
}
UNIFORM = {"uniform8": 8, "uniform4": 4}
PAYLOADS = ("ternary", "largest_of_7", *UNIFORM, "bfloat16", None)


def exchanged(payload, tree, step=7, **axes):
    """``Means`` of one worker's arrays, as trees."""
    between = slamb_jax.Exchange(AXIS, payload=payload, **axes)
    found = mean_over_workers(
        jax.tree.leaves(tree), leaves_of(tree), between, payload, jnp.int32(step),
        with_errors=True,
    )  # fmt: skip
    rebuild = jax.tree.structure(tree).unflatten
    return type(found)(*(None if x is None else rebuild(x) for x in found))


def on_workers(payload, tree, mapping="vmap", step=7):
    n = len(jax.tree.leaves(tree)[0])
    run = over_workers(lambda x: exchanged(payload, x, step), mapping, n)
    return jax.tree.map(np.asarray, run(tree))


def assert_alike(tree):
    assert_same_bits(tree, jax.tree.map(lambda x: np.stack([x[0]] * len(x)), tree))


@pytest.mark.parametrize(  # of 3 workers no slice is full
    ("payload", "n"),
    [("ternary", 2), ("ternary", 3), ("largest_of_7", 3), ("largest_of_31", 8)],
)
def test_it_is_the_code_of_the_mean_of_codes(payload, n):
    tree = random_tree(SHAPES, 3, n)
    found = on_workers(payload, tree)
    assert_alike(found.means)
    for name, x in tree.items():
        x = np.asarray(x).reshape(n, -1)
        group = quantizer_of(payload).group_of(x.shape[1])
        sent = np.stack([coded(payload, own, group) for own in x])
        both = (
            (found.sent, sent),
            (found.means, coded(payload, sent.mean(0), group)[None]),
        )
        for got, want in both:
            got = got[name].reshape(n, -1)
            assert_close(got, np.broadcast_to(want, got.shape))


@pytest.mark.parametrize(
    ("payload", "mapping"),
    [(payload, "vmap") for payload in PAYLOADS]
    + [(payload, "shard_map") for payload in ("ternary", "uniform8", "bfloat16", None)],
)
def test_what_was_sent_is_the_mean_and_what_rounding_took_of_it(payload, mapping):
    tree = random_tree(SHAPES, 5, N)
    means, sent, lost = on_workers(payload, tree, mapping)
    assert_alike(means)
    if payload is None:
        assert_close(means, jax.tree.map(lambda x: np.stack([x.mean(0)] * N), tree))
        assert sent is lost is None
        return
    for name, x in tree.items():
        x, mean = np.asarray(x), means[name][0]
        if payload == "bfloat16":
            assert_same_bits(sent[name], x.astype("bfloat16").astype(np.float32))
            unit = 2.0**-8 * np.abs(x).max(initial=0)
            np.testing.assert_allclose(mean, sent[name].mean(0), atol=unit, rtol=0)
            continue
        assert_close(sent[name].mean(0), mean + lost[name].mean(0), units=64)
        assert (lost[name] != 0).sum(0).max(
            initial=0
        ) <= 1  # an array's part has one owner
        if payload in UNIFORM:
            group = quantizer_of(payload).group_of(max(1, mean.size))
            for i in range(N):
                off = np.abs(sent[name][i] - x[i]).reshape(-1)
                step = grid(UNIFORM[payload], x[i].reshape(-1), group)
                assert (off <= 1.0001 * step).all()
            step = grid(UNIFORM[payload], sent[name].mean(0).reshape(-1), group)
            assert (np.abs(lost[name]).mean(0).reshape(-1) <= 1.0001 * step).all()
    assert (lost is None) == (payload == "bfloat16")


@pytest.mark.parametrize(
    ("payload", "mapping"),
    [(payload, "vmap") for payload in PAYLOADS]
    + [(payload, "shard_map") for payload in ("ternary", "bfloat16")],
)
def test_groups_of_devices_find_what_single_devices_find(payload, mapping):
    """Each device exchanges a slice; all devices of a worker hold the same arrays."""
    tree = random_tree(SHAPES, 6, N)
    run = functools.partial(exchanged, payload, local_axis_name="device")
    if mapping == "vmap":
        twice = jax.vmap(run, axis_name="device", axis_size=2, in_axes=None)
        found = jax.jit(jax.vmap(twice, axis_name=AXIS))(tree)
    else:
        mesh = jax.sharding.Mesh(
            np.array(jax.devices()).reshape(N, 2), (AXIS, "device")
        )

        def one_of_many(tree):
            out = run(jax.tree.map(lambda x: x[0], tree))
            return jax.tree.map(lambda x: x[None, None], out)

        found = jax.jit(
            jax.shard_map(
                one_of_many, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS, "device"),
                check_vma=False,
            )
        )(tree)  # fmt: skip
    assert_alike(jax.tree.map(lambda x: x.reshape(2 * N, *x.shape[2:]), found.means))
    means, sent, lost = jax.tree.map(lambda x: x[:, 0], found)
    if payload not in UNIFORM:  # which draw for each device
        alone = on_workers(payload, tree)
        assert_close((means, sent), (alone.means, alone.sent), units=8)
    if lost is not None:
        got = jax.tree.map(lambda x, y: np.mean(x + y, 0), means, lost)
        assert_close(got, jax.tree.map(lambda x: x.mean(0), sent))


@pytest.mark.parametrize("payload", ["uniform8", "ternary"])
def test_arrays_of_all_sizes_are_sent_in_one_exchange(payload):
    tree = random_tree(SHAPES, 5)
    run = functools.partial(exchanged, payload)
    text = str(jax.make_jaxpr(run, axis_env=[(AXIS, N)])(tree))
    assert text.count("all_to_all[") == text.count("all_gather[") == 1


@pytest.mark.parametrize("payload", UNIFORM)
def test_workers_and_steps_round_otherwise(payload):
    same = jnp.broadcast_to(random_tree({"x": (500,)}, 0)["x"], (N, 500))
    one, again, later = (on_workers(payload, same, step=t).sent for t in (7, 7, 8))
    assert_same_bits(one, again)
    assert (one != later).mean() > 0.2
    assert (one[0] != one[1]).mean() > 0.2


@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_is_not_finite_reaches_all(payload):
    x = random_tree({"x": (N, 400)}, 0)["x"].at[2, 37].set(jnp.inf)
    assert not np.isfinite(on_workers(payload, x).means[:, 37]).any()


@pytest.mark.parametrize("payload", ["ternary", "largest_of_7"])
def test_no_block_is_of_two_leaves(payload):
    """A leaf that is a thousand times smaller than those beside it is sent, too."""
    shapes = {"a": (40, 60), "b": (60,), "c": (3,), "d": (50, 70)}
    tree = random_tree(shapes, 1, N)
    small = {k: x * (1e-3 if k in "bd" else 1.0) for k, x in tree.items()}
    both = (on_workers(payload, x).means for x in (tree, small))
    for name, (x, y) in zip(
        shapes, zip(*map(dict.values, both), strict=True), strict=True
    ):
        assert_close(y, x * np.float32(1e-3 if name in "bd" else 1.0), units=8)


@pytest.mark.parametrize(
    ("payload", "dtype"),
    [("ternary", "u8"), ("uniform8", "u8"), ("bfloat16", "u16")],
)
def test_the_wire_has_its_dtype_and_bytes(payload, dtype):
    """In the compiled program, where a cast may have been moved."""
    params, n = random_tree({"a": (100, 120), "odd": (101, 103), "bias": (512,)}, 0), 8
    sizes = [x.size for x in jax.tree.leaves(params)]
    for every in (1, 10):
        outer = None if every == 1 else optax.sgd(1.0)
        between = slamb_jax.Exchange(
            AXIS, payload=payload, sync_every=every, outer=outer
        )
        report = report_of(slamb_jax.adamw(0.1, between), params, n)
        found = {(c.dtype, c.kind, c.conditional) for c in report.collectives}
        kinds = ("all-to-all", "all-gather")
        assert found == {(dtype, kind, every > 1) for kind in kinds}
        want = -(-sum(sizes) // n) * 2
        if payload != "bfloat16":
            want = slice_nbytes(sizes, payload, n)
        # To the owners of the slices, and the means of the slices back.
        got = report.bytes_sent(conditional=every > 1)
        assert got == pytest.approx(2 * (n - 1) * want, rel=1e-3)


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


@pytest.mark.parametrize(
    ("n", "mapping", "axis"),
    [(n, "vmap", AXIS) for n in (2, 3, 17)]
    + [(8, m, ("node", "device")) for m in ("shard_map", "shard_map_unchecked")],
)
def test_a_mean_of_16_bits_is_rounded_once(n, mapping, axis):
    xs = [random_tree({"x": (size,)}, n, n)["x"].astype("bfloat16") for size in (37, 5)]
    means = over_workers(lambda *xs: pmean(xs, axis), mapping, n, axis)(*xs)
    for got, x in zip(means, xs, strict=True):
        assert got.dtype == x.dtype
        assert_alike(np.asarray(got))
        want = jnp.mean(x.astype(jnp.float32), 0).astype(x.dtype)
        # To a unit in the last place: the order of the sum may tip it.
        got, want = np.asarray(got[0], np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=0)


def test_a_mean_over_one_worker_does_not_vary():
    mean = functools.partial(slamb_jax.average_parameters, axis_name=AXIS)
    run = jax.shard_map(mean, mesh=mesh_of(1), in_specs=P(AXIS), out_specs=P())
    assert (np.asarray(jax.jit(run)(jnp.ones((1, 3)))) == 1).all()
