"""Payloads: their dtype and bytes on the wire, and that nothing is lost by them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slamb_jax._ex.budget import sent_of
from slamb_jax._ex.means import exchange_means
from slamb_jax._ex.payloads import resolve_payload
from slamb_jax.payloads import StochasticUniform

import slamb_jax
from slamb_jax._leaves import leaves_of
from slamb_jax._rounding import hash_u32, hash_words
from slamb_jax.exchange import flat
from tests.close import assert_close, assert_same_bits
from tests.compiled import report_of
from tests.optimizers import exchange, random_tree, slamb
from tests.workers import AXIS, over_workers, stack, stepper

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "odd": (7, 11), "empty": (0, 3), "scale": ()}
UNIFORM = StochasticUniform(8, block_size=32, error_feedback=True)
FOUR = StochasticUniform(4, block_size=32)
FLOATS = ("bfloat16",)
CODES = {"uniform8": UNIFORM, "uniform4": FOUR}
PAYLOADS = {name: name for name in FLOATS} | CODES


def each_of(payloads):
    """One of 16 bits and one in codes by default, the others in CI."""
    return pytest.mark.parametrize(
        "payload",
        [
            pytest.param(x, id=name, marks=() if name in QUICK else pytest.mark.long)
            for name, x in payloads.items()
        ],
    )


QUICK = {"bfloat16", "uniform8"}
each, coded = each_of(PAYLOADS), each_of(CODES)


def gradients(steps):
    return [random_tree(SHAPES, 1 + t, N) for t in range(steps)]


def sent_by(**settings):
    tx = slamb(sync_every=10, min_size=9000, **settings)
    return report_of(tx, random_tree(LARGE, 0), 8)


LARGE = {"a": (100, 120), "odd": (101, 103), "bias": (512,)}


def naive_nbytes(sizes, payload, n=8):
    """Of slices of n workers, whole blocks each: to the owners, and the means back."""
    total = 0
    for small in (True, False):
        chosen = [size for size in sizes if (size < 2**11) == small and size]
        if not chosen:
            continue
        block = np.prod(payload.group_of(chosen[0]))
        owned = -(-sum(-(-size // block) for size in chosen) // n)
        scale = type(payload)._scale_bytes
        total += 2 * owned * (block * payload.bits // 8 + scale)
    return total


@each
def test_the_wire_has_its_dtype_and_bytes(payload):
    """In the compiled program, where a cast may have been moved."""
    report = sent_by(payload=payload, average_payload=payload)
    assert {c.dtype for c in report.collectives} == {
        "u16" if isinstance(payload, str) else "u8"
    }
    kinds = [(c.kind, c.conditional) for c in report.collectives]
    assert sorted(kinds) == [
        ("all-gather", False), ("all-gather", True),
        ("all-to-all", False), ("all-to-all", True),
    ]  # fmt: skip
    wide = sent_by()
    leaves = leaves_of(random_tree(LARGE, 0))
    between = exchange(sync_every=10, min_size=9000)
    for conditional in (False, True):
        got, full = (r.bytes_sent(conditional=conditional) for r in (report, wide))
        if isinstance(payload, str):
            assert got == pytest.approx(full / 2, rel=0.01)
        else:
            sizes = [sent[conditional] for sent in sent_of(leaves, between)]
            assert got == 7 * naive_nbytes(sizes, payload)


def test_payloads_have_names():
    names = ["uniform8", "uniform4", *FLOATS]
    kinds = [StochasticUniform(8), StochasticUniform(4), *FLOATS]
    assert [resolve_payload(name) for name in names] == kinds


def on_workers(payload, x, step=7):
    def run(x):
        leaf = slamb_jax.selections.Leaf(0, x.shape)
        found = exchange_means(
            [x], [leaf], exchange(), payload, jnp.int32(step), with_errors=True
        )
        return [None if y is None else y[0] for y in found]

    found = jax.jit(jax.vmap(run, axis_name=AXIS))(x)
    return [None if y is None else np.asarray(y) for y in found]


@pytest.mark.parametrize(
    "shape", [(16, 256), (3, 8, 128), (12, 128), (2, 9, 256), (7, 128), (8,)]
)
def test_a_flat_array_has_its_tiles_one_after_the_other_on_a_tpu(shape, monkeypatch):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    for platform in ("tpu", "default"):
        monkeypatch.setattr(
            flat.lax, "platform_dependent", lambda x, p=platform, **by: by[p](x)
        )
        there = flat.flatten(x, flat.flat_size(shape) + 5)
        assert_same_bits(flat.unflatten(there, shape), x)
        if platform == "tpu" and shape == (16, 256):
            assert_same_bits(there[:1024].reshape(8, 128), x[:8, :128])
        else:
            assert_same_bits(there[: min(128, x.size)], x.reshape(-1)[:128])


@pytest.mark.parametrize("payload", ["uniform8", "ternary"])
def test_arrays_of_all_sizes_are_sent_together(payload):
    """What is sent is the mean and what rounding took of it; in one exchange."""
    shapes = {"large": (300, 301), "small": (50,), "odd": (70_001,), "b": (3, 7)}
    leaves = [slamb_jax.selections.Leaf(i, x) for i, x in enumerate(shapes.values())]
    xs = list(random_tree(shapes, 5, N).values())

    def run(*xs):
        return exchange_means(
            xs, leaves, exchange(), payload, jnp.int32(7), with_errors=True
        )

    found = jax.jit(jax.vmap(run, axis_name=AXIS))(*xs)
    for x, mean, sent, error in zip(xs, *found, strict=True):
        assert_same_bits([mean[0]] * N, list(mean))
        assert_close(sent.mean(0), mean[0] + error.mean(0), units=64)
        assert np.linalg.norm(sent - x) < 0.7 * np.linalg.norm(x)
    text = str(jax.make_jaxpr(run, axis_env=[(AXIS, N)])(*(x[0] for x in xs)))
    assert text.count("all_to_all[") == text.count("all_gather[") == 1


def test_a_large_array_is_encoded_where_it_lies():
    """In whole groups, however many workers own slices of its codes."""
    ternary = resolve_payload("ternary")
    x = random_tree({"x": (64, 5120)}, 3, 8)["x"]  # 64 groups, of 8 blocks
    there_and_back = jax.jit(lambda x: ternary.decode(ternary.encode(x, 0), x.size))
    own = np.stack([there_and_back(jnp.asarray(row).reshape(-1)) for row in x])
    for n in (2, 3, 8):  # of 3 no worker's slice is full
        mean, sent, _ = on_workers(ternary, x[:n])
        assert_close(sent.reshape(n, -1), own[:n], units=8)
        assert_same_bits([mean[0]] * n, list(mean))
        want = there_and_back(jnp.asarray(own[:n].mean(0)))
        # A coordinate at the threshold may fall to either side of it.
        off = np.abs(mean[0].reshape(-1) - want) > 1e-5 * np.abs(want).max()
        assert off.mean() < 1e-4


class Naive:
    """The exchange of codes in NumPy, worker by worker; U by the same hash."""

    def __init__(self, quantizer, step):
        self.quantizer = quantizer
        seed = hash_words(quantizer.seed, 0x5A17)
        self.seed = hash_u32(np.asarray([step], np.uint32), seed)

    def rounded(self, blocks, worker, stage, quantizer):
        """``blocks`` (groups, planes, rows, width); a row of all planes is a block."""
        part = hash_u32(self.seed, hash_words(0))
        word = hash_u32(np.asarray([worker], np.uint32), part)
        seed = hash_u32(word, hash_words(stage))
        place = np.arange(blocks.size, dtype=np.uint32).reshape(blocks.shape)
        draw = (hash_u32(place, seed) >> np.uint32(8)).astype(np.float32)
        levels = np.float32(2 ** (quantizer.bits - 1) - 1)
        largest = np.abs(blocks).max((-3, -1), keepdims=True)
        y = blocks * (levels / np.where(largest > 0, largest, 1))
        code = np.floor(y) + (draw * np.float32(2**-24) < y - np.floor(y))
        return np.clip(code, -levels, levels) * (largest / levels)

    def __call__(self, x):
        n, d = x.shape
        _, planes, rows, width = cut = self.quantizer.group_of(d)
        assert rows == 1  # the array is small: a group is a block
        groups = -(-d // cut.size)
        padded = np.zeros((n, groups * cut.size), np.float32)
        padded[:, :d] = x
        blocks = padded.reshape(n, groups, planes, 1, width)
        sent = np.stack(
            [self.rounded(b, i, 3, self.quantizer) for i, b in enumerate(blocks)]
        )
        owned = -(-groups // n)  # blocks of each worker
        mean = np.zeros((n * owned, planes, width), np.float32)
        mean[:groups] = sent.mean(0)[:, :, 0]
        slices = mean.reshape(n, owned, planes, width).swapaxes(1, 2)[:, None]
        back = [self.rounded(s, i, 2, self.quantizer) for i, s in enumerate(slices)]
        means = np.stack(back)[:, 0].swapaxes(1, 2).reshape(-1)
        return means[:d], sent.reshape(n, -1)[:, :d]


@pytest.mark.parametrize(("bits", "size"), [(8, 40), (4, 301), (4, 99)])
def test_an_exchange_of_codes_is_that_of_the_naive_version(bits, size):
    quantizer = StochasticUniform(bits, 32, seed=3)
    x = np.random.default_rng(0).normal(size=(N, size)).astype(np.float32)
    means, sent = Naive(quantizer, 7)(x)
    got, got_sent, error = on_workers(quantizer, jnp.asarray(x))
    assert_close(got_sent, sent)
    assert_same_bits(got, np.broadcast_to(got[:1], got.shape))
    assert_close(got[0], means)
    largest = np.abs(x).max()
    assert_close(error.mean(0), sent.mean(0) - means, floor=largest)
    assert (error != 0).sum(0).max() == 1  # a slice has one owner


@coded
def test_workers_and_steps_round_otherwise(payload):
    same = jnp.broadcast_to(random_tree({"x": (500,)}, 0)["x"], (N, 500))
    one, again, later = (on_workers(payload, same, step)[1] for step in (7, 7, 8))
    assert_same_bits(one, again)
    assert (one != later).mean() > 0.2
    assert (one[0] != one[1]).mean() > 0.2


@coded
@pytest.mark.parametrize("keep", [True, False])
def test_the_mean_is_kept(payload, keep):
    """Of updates and residuals together, to float32."""
    payload = dataclasses.replace(payload, error_feedback=True)
    tx = slamb_jax.randk_compress_with_error_feedback(
        exchange(compress_ratio=0.5, payload=payload), keep_residual=keep
    )
    step = over_workers(tx.update, "vmap", N)
    state = stack(tx.init(random_tree(SHAPES, 0)), N)
    for g in gradients(4):
        before = state
        u, state = step(g, before)
        x, got = (
            jax.tree.map(lambda x, e: np.mean(x + np.asarray(e), 0), *both)
            for both in ((g, before.residual), (u, state.residual))
        )
        assert_close(got, x, floor=1.0)


@pytest.mark.long
def test_what_is_not_finite_reaches_all():
    x = random_tree({"x": (N, 400)}, 0)["x"].at[2, 37].set(jnp.inf)
    for payload in PAYLOADS.values():
        assert not np.isfinite(on_workers(payload, x)[0][:, 37]).any()


@each
def test_the_average_as_a_difference(payload):
    between = exchange(sync_every=2, average_payload=payload, average_b2=None)
    tx = slamb_jax.average_parameters_every(between)
    start = random_tree(SHAPES, 0)
    state, params = stack(tx.init(start), N), stack(start, N)
    step = stepper(tx, "vmap", N)
    for t, u in enumerate(gradients(5)):
        u = jax.tree.map(lambda x: 0.01 * x, u)
        there = jax.tree.map(lambda p, u: np.asarray(p + u, np.float64), params, u)
        before = state.anchor
        params, state = step(u, state, params)
        for name in SHAPES:
            anchor, p = np.asarray(state.anchor[name]), np.asarray(params[name])
            assert (anchor == anchor[:1]).all()  # to the bit, on all workers
            if t % 2:  # no average
                assert_same_bits(anchor, before[name])
                continue
            away = np.abs(there[name] - np.asarray(before[name]))
            spread = {"bfloat16": 2**-8, "float16": 2**-11, UNIFORM: 1 / 100, FOUR: 0.2}
            allowed = 2 * spread.get(payload, 1.0) * away.max(initial=0.0) + 1e-6
            # Each is near the mean, and the mean stayed.
            mean = there[name].mean(0)
            assert (np.abs(p - mean[None]) <= 2 * allowed).all()
            assert (np.abs(p.mean(0) - mean) <= allowed).all()


def test_what_rounding_took_is_sent_later():
    """While nothing moves, averages join the replicas, and the mean stays."""
    between = exchange(sync_every=1, average_payload=UNIFORM, average_b2=None)
    tx = slamb_jax.average_parameters_every(between)
    params = random_tree({"w": (32, 32)}, 0, N)
    mean, zero = np.asarray(params["w"]).mean(0), stack({"w": jnp.zeros((32, 32))}, N)
    state, step = stack(tx.init({"w": jnp.zeros((32, 32))}), N), stepper(tx, "vmap", N)
    spreads = []
    for _ in range(8):
        params, state = step(zero, state, params)
        spreads.append(float(np.ptp(np.asarray(params["w"]), axis=0).max()))
    assert spreads[1] < 0.5 * spreads[0]
    assert spreads[-1] < 2e-5
    moved = np.abs(np.asarray(params["w"]).mean(0) - mean).max()
    assert moved < 0.02  # the first mean's own rounding, a step of its grid


def test_an_average_in_codes_leaves_the_replicas_equal():
    """To the bit, without a copy of the last average, if nothing is kept."""
    tx = slamb_jax.average_parameters_every(exchange(sync_every=1))
    start = random_tree(SHAPES, 0)
    assert jax.tree.leaves(tx.init(start).anchor) == []
    state, params = stack(tx.init(start), N), stack(start, N)
    step = stepper(tx, "vmap", N)
    for u in gradients(3):
        before = params
        params, state = step(jax.tree.map(lambda x: 0.01 * x, u), state, params)
        for name, p in params.items():
            assert_same_bits(np.asarray(p), np.broadcast_to(p[:1], p.shape))
            assert p.size == 0 or (np.asarray(p) != np.asarray(before[name])).any()


def test_no_block_is_of_two_leaves():
    """A leaf that steps a thousand times smaller than those beside it moves, too."""
    shapes = {"a": (40, 60), "b": (60,), "c": (3,), "d": (50, 70)}
    scales = {"a": 1.0, "b": 1e-3, "c": 1.0, "d": 1e-3}
    tx = slamb_jax.average_parameters_every(exchange(sync_every=1))
    start = random_tree(shapes, 0)
    state, params = stack(tx.init(start), N), stack(start, N)
    u = random_tree(shapes, 1, N)
    u = {name: scales[name] * x for name, x in u.items()}
    moved = stepper(tx, "vmap", N)(u, state, params)[0]
    for name, x in u.items():
        got, mean = np.asarray(moved[name] - params[name])[0], np.asarray(x).mean(0)
        cosine = (got * mean).sum() / np.linalg.norm(got) / np.linalg.norm(mean)
        assert cosine > 0.6
        assert 0.1 < np.linalg.norm(got) / np.linalg.norm(mean) < 10


def test_what_keeps_a_copy_of_the_last_average():
    params = random_tree(SHAPES, 0)

    def copies(**settings):
        between = slamb_jax.Exchange(AXIS, **settings)
        state = slamb_jax.average_parameters_every(between).init(params)
        sizes = [sum(x.size for x in jax.tree.leaves(y)) for y in (state, params)]
        return sizes[0] // sizes[1]  # without the scalars

    feedback = slamb_jax.payloads.Ternary(error_feedback=True)
    assert copies(average_payload=None) == 0
    assert copies(average_b2=None) == 0
    assert copies() == 1  # the second moment
    assert copies(sync_every=2, average_b2=None) == 1
    assert copies(overlap=True, average_b2=None) == 1
    assert copies(average_payload=feedback, average_b2=None) == 1
    assert copies(average_payload=feedback) == 2
