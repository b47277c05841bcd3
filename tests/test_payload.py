"""What travels in fewer bits: its dtype and bytes, and that nothing gets lost by it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._checkpoint_form import named
from slamb_jax._exchange import Route, exchange, means_of
from slamb_jax._hashing import hash_u32, hash_words
from tests.workers import AXIS, over_workers, random_tree, stack, stepper, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "odd": (7, 11), "empty": (0, 3), "scale": ()}
UNIFORM = slamb_jax.StochasticUniform(8, block_size=32, error_feedback=True)
FOUR = slamb_jax.StochasticUniform(4, block_size=32)
MIXED = slamb_jax.StochasticUniform(4, block_size=32, mean_bits=8)
NATURAL = slamb_jax.NaturalCompression(8, block_size=32)
NATURAL4 = slamb_jax.NaturalCompression(4, block_size=32)
PAYLOADS = {
    "bfloat16": "bfloat16", "float16": "float16",
    "uniform8": UNIFORM, "uniform4": FOUR, "mixed": MIXED,
    "natural": NATURAL,
}  # fmt: skip
each = pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
coded = pytest.mark.parametrize(
    "payload", [UNIFORM, FOUR, MIXED, NATURAL, NATURAL4], ids="84mnN"
)


def gradients(steps, seed=1):
    return [random_tree(SHAPES, seed + t, N) for t in range(steps)]


def small_slamb(**settings):
    settings = {"min_size": 20, "sync_every": 3, "b3": 0.9} | settings
    return slamb_jax.slamb(0.01, axis_name=AXIS, **settings)


def close(got, want, tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), atol=tolerance
        ),
        got, want,
    )  # fmt: skip


LARGE = {"a": (100, 120), "odd": (101, 103), "bias": (512,)}


@functools.cache
def float32_report(n):
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, sync_every=10)
    params = random_tree(LARGE, 0)
    stacked, state = stack(params, n), stack(tx.init(params), n)
    step = stepper(tx, "shard_map", n)
    return slamb_jax.wire_report(step.lower(stacked, state, stacked))


@each
def test_it_travels_as_asked(payload):
    """In the compiled program, where a cast may have been moved."""
    n = 8
    tx = slamb_jax.slamb(
        0.01, axis_name=AXIS, payload=payload, average_payload=payload, sync_every=10
    )
    params = random_tree(LARGE, 0)
    stacked, state = stack(params, n), stack(tx.init(params), n)
    step = stepper(tx, "shard_map", n)
    report = slamb_jax.wire_report(step.lower(stacked, state, stacked))
    wide = float32_report(n)
    narrow = isinstance(payload, str)
    assert {c.dtype for c in report.collectives} == {"u16" if narrow else "u8"}
    kinds = [(c.kind, c.conditional) for c in report.collectives]
    assert sorted(kinds) == [
        ("all-gather", False), ("all-gather", True),
        ("all-to-all", False), ("all-to-all", True),
    ]  # fmt: skip
    bits = 16 if narrow else (payload.bits + payload.for_means.bits) / 2
    overhead = {UNIFORM: 32, FOUR: 32, MIXED: 32, NATURAL: 8}  # bits a block of 32
    scale = overhead.get(payload, 0) / 32
    for conditional in (False, True):
        got, full = (r.bytes_sent(conditional=conditional) for r in (report, wide))
        assert got == pytest.approx(full * (bits + scale) / 32, rel=0.05)
        if not narrow:
            slices = -(-round(full / 7) // n)
            both = payload.nbytes(slices) + payload.for_means.nbytes(slices)
            assert got == 7 * both


@pytest.mark.parametrize(
    ("payload", "mapping"),
    [
        (UNIFORM, "shard_map"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (UNIFORM, "pmap"),
                (FOUR, "shard_map"),
                (NATURAL, "shard_map_unchecked"),
                ("float16", "shard_map"),
            )
        ),
    ],
)
def test_every_mapping_gives_the_same_numbers(payload, mapping):
    tx = small_slamb(payload=payload, average_payload=payload)
    want = train(tx, random_tree(SHAPES, 0), gradients(4), "vmap")
    history = train(tx, random_tree(SHAPES, 0), gradients(4), mapping)
    for got, expected in zip(history, want, strict=True):
        close(got, expected, 0.05)  # should a last bit tip a rounding
    pairs = zip(*map(jax.tree.leaves, (history, want)), strict=True)
    off = [(np.abs(a - b) > 2e-6).mean() for a, b in pairs if a.size]
    assert np.mean(off) < 0.01


def on_workers(payload, arrays, step=7, n=N):
    def run(x):
        return exchange([x], Route(AXIS, None, payload), jnp.int32(step))

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(run, axis_name=AXIS))(arrays))


class Naive:
    """The exchange in NumPy, worker by worker; U by the same hash."""

    def __init__(self, quantizer, step):
        self.quantizer = quantizer
        seed = hash_words(quantizer.seed, 0x5A17)
        self.salt = hash_u32(np.asarray([step], np.uint32), seed)

    def rounded(self, x, worker, stage):
        """``x`` of shape (slices, size), each slice in blocks of one scale."""
        word = hash_u32(np.asarray([worker], np.uint32), self.salt)
        salt = hash_u32(word, hash_words(stage))
        size = x.shape[-1]
        count = -(-size // self.quantizer.block_size)
        length = -(-size // count)
        length += length % 2
        blocks = np.zeros((len(x), count * length), np.float32)
        blocks[:, :size] = x
        blocks = blocks.reshape(len(x), count, length)
        place = np.arange(blocks.size, dtype=np.uint32).reshape(blocks.shape)
        u = (hash_u32(place, salt) >> np.uint32(8)).astype(np.float32) * np.float32(
            2**-24
        )
        levels = np.float32(2 ** (self.quantizer.bits - 1) - 1)
        largest = np.abs(blocks).max(-1, keepdims=True)
        y = blocks * (levels / largest)
        code = np.floor(y) + (u < y - np.floor(y))
        out = np.clip(code, -levels, levels) * (largest / levels)
        return out.reshape(len(x), -1)[:, :size]

    def __call__(self, x, own_exact):
        n, d = x.shape
        padded = np.zeros((n, -(-d // n) * n), np.float32)
        padded[:, :d] = x
        slices = padded.reshape(n, n, -1)
        sent = np.stack([self.rounded(slices[i], i, 0) for i in range(n)])
        if own_exact:  # does not leave
            sent[np.arange(n), np.arange(n)] = slices[np.arange(n), np.arange(n)]
        owner = sent.mean(0)  # row i is averaged by worker i
        means = np.concatenate([self.rounded(owner[i : i + 1], i, 1) for i in range(n)])
        return means.reshape(-1)[:d], sent.reshape(n, -1)[:, :d]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [40, 301])
def test_codes_are_those_of_a_naive_exchange(bits, size):
    quantizer = slamb_jax.StochasticUniform(bits, block_size=32, seed=3)
    x = np.random.default_rng(0).normal(size=(N, size)).astype(np.float32)
    means, _ = Naive(quantizer, 7)(x, own_exact=False)
    route = Route(AXIS, None, quantizer)
    plain = jax.vmap(lambda x: means_of([x], route, jnp.int32(7)), axis_name=AXIS)
    np.testing.assert_allclose(plain(jnp.asarray(x))[0][0], means, atol=1e-6)
    means, sent = Naive(quantizer, 7)(x, own_exact=True)
    found = on_workers(quantizer, jnp.asarray(x))
    np.testing.assert_allclose(found.sent[0], sent, atol=1e-6)
    for worker in range(N):
        assert found.means[0][worker].tobytes() == found.means[0][0].tobytes()
    np.testing.assert_allclose(found.means[0][0], means, atol=1e-6)
    owed = found.owed[0].mean(0)
    np.testing.assert_allclose(owed, sent.mean(0) - means, atol=1e-6)
    assert (found.owed[0] != 0).sum(0).max() == 1  # a slice has one owner


@coded
def test_workers_and_steps_round_otherwise(payload):
    same = jnp.broadcast_to(random_tree({"x": (500,)}, 0)["x"], (N, 500))
    one, again, later = (on_workers(payload, same, step).sent[0] for step in (7, 7, 8))
    assert one.tobytes() == again.tobytes()
    assert (one != later).mean() > 0.2
    assert (one[0] != one[1]).mean() > 0.2


@coded
@pytest.mark.parametrize("keep", [True, False])
def test_the_mean_is_kept(payload, keep):
    """Of updates and residuals together, exactly."""
    tx = slamb_jax.randk_compress_with_error_feedback(
        slamb_jax.Strided(0.5, 20), axis_name=AXIS, payload=_feeding_back(payload),
        keep_residual=keep,
    )  # fmt: skip
    step = over_workers(tx.update, "vmap", N)
    state = stack(tx.init(random_tree(SHAPES, 0)), N)
    for g in gradients(4):
        before = state
        u, state = step(g, before)
        for name in SHAPES:
            x, got = (
                np.asarray(a[name], np.float64) + np.asarray(b.residual[name])
                for a, b in ((g, before), (u, state))
            )
            np.testing.assert_allclose(got.mean(0), x.mean(0), atol=2e-6)


def _feeding_back(payload):
    return dataclasses.replace(payload, error_feedback=True)


def test_means_in_eight_bits_are_finer():
    """What they are rounded by is not averaged, unlike what each worker's part is."""
    x = random_tree({"x": (N, 4000)}, 0)["x"]
    errors = {}
    for payload in (FOUR, MIXED, dataclasses.replace(MIXED, bits=8)):
        means = np.asarray(on_workers(payload, x).means[0])
        assert (means == means[:1]).all()
        errors[payload] = np.std(means[0] - np.asarray(x).mean(0))
    four, mixed, eight = errors.values()
    assert eight < 0.2 * mixed < 0.2 * 0.95 * four


@coded
def test_error_feedback_takes_the_error_out_of_what_is_added_up(payload):
    """Of T steps with the same momentum: an error of one, not of the root of T."""
    g = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(N, 64, 64)), "float32")}
    steps, errors = 16, {}
    for feeds_back in (True, False):
        tx = slamb_jax.randk_compress_with_error_feedback(
            slamb_jax.Strided(1.0, 0), axis_name=AXIS, keep_residual=False,
            payload=dataclasses.replace(payload, error_feedback=feeds_back),
        )  # fmt: skip
        state = stack(tx.init({"w": jnp.zeros((64, 64))}), N)
        assert (state.residual is not None) == feeds_back
        step, total = over_workers(tx.update, "vmap", N), 0.0
        for _ in range(steps):
            u, state = step(g, state)
            u = np.asarray(u["w"])
            assert (u == u[0]).all()  # as ever, the same on all
            total = total + u[0]
        errors[feeds_back] = np.std(total - steps * np.asarray(g["w"]).mean(0))
    assert errors[True] < 0.5 * errors[False]


@pytest.mark.long
def test_it_composes():
    """With 16-bit momentum and compression warm-up; near the run in float32."""
    kinds = {"mu_dtype": "bfloat16", "compress_ratio": {0: 0.5, 2: 0.25}}
    want = train(small_slamb(**kinds), random_tree(SHAPES, 0), gradients(4), "vmap")
    for payload in (UNIFORM, "float16"):
        tx = small_slamb(payload=payload, average_payload=payload, **kinds)
        got = train(tx, random_tree(SHAPES, 0), gradients(4), "shard_map")
        close(got[-1][0], want[-1][0], 0.05)
        assert got[-1][1][0].mu["w"].dtype == jnp.bfloat16


def test_a_poisoned_step_is_as_if_it_had_not_been():
    payload = UNIFORM
    tx = slamb_jax.skip_not_finite(
        small_slamb(payload=payload, average_payload=payload), AXIS
    )
    grads = gradients(4)
    bad = jax.tree.map(lambda x: x, grads[1])
    bad["w"] = bad["w"].at[2, 3, 5].set(jnp.nan)
    params = random_tree(SHAPES, 0)
    want = train(tx, params, grads, "shard_map")[-1]
    got = train(tx, params, [grads[0], bad, *grads[1:]], "shard_map")[-1]
    assert got[1].total_notfinite.tolist() == [1] * N
    for a, b in zip(*(map(jax.tree.leaves, (got[0], want[0]))), strict=True):
        assert a.tobytes() == b.tobytes()


def test_what_is_not_finite_reaches_all():
    x = random_tree({"x": (N, 400)}, 0)["x"].at[2, 37].set(jnp.inf)
    for payload in PAYLOADS.values():
        means = on_workers(payload, x).means[0]
        assert not np.isfinite(means[:, 37]).any()


@each
def test_the_average_as_a_difference(payload):
    tx = slamb_jax.average_parameters_every(2, AXIS, payload=payload)
    start, steps = random_tree(SHAPES, 0), gradients(5)
    state, params = stack(tx.init(start), N), stack(start, N)
    step = stepper(tx, "shard_map", N)
    for t, u in enumerate(steps):
        u = jax.tree.map(lambda x: 0.01 * x, u)
        there = jax.tree.map(lambda p, u: np.asarray(p + u, np.float64), params, u)
        before = state.anchor
        params, state = step(u, state, params)
        for name in SHAPES:
            anchor, p = np.asarray(state.anchor[name]), np.asarray(params[name])
            assert (anchor == anchor[:1]).all()  # to the bit, on all workers
            if t % 2:  # no average
                assert anchor.tobytes() == np.asarray(before[name]).tobytes()
                continue
            away = np.abs(there[name] - np.asarray(before[name]))
            spread = {"bfloat16": 2**-8, "float16": 2**-11, UNIFORM: 1 / 100, FOUR: 0.2}
            allowed = 2 * spread.get(payload, 1.0) * away.max(initial=0.0) + 1e-6
            # Each is near the mean, and the mean stayed.
            mean = there[name].mean(0)
            assert (np.abs(p - mean[None]) <= 2 * allowed).all()
            assert (np.abs(p.mean(0) - mean) <= allowed).all()


def test_what_rounding_took_is_sent_later():
    """Nothing moves any more: averages join the replicas, and the mean stays."""
    for payload, far in (("bfloat16", 2e-6), (UNIFORM, 2e-5)):
        tx = slamb_jax.average_parameters_every(1, AXIS, payload=payload)
        start = {"w": jnp.zeros((32, 32))}
        params = random_tree({"w": (32, 32)}, 0, N)
        mean = np.asarray(params["w"]).mean(0)
        state, step = stack(tx.init(start), N), stepper(tx, "vmap", N)
        spreads = []
        for _ in range(8):
            params, state = step(jax.tree.map(jnp.zeros_like, params), state, params)
            spreads.append(float(np.ptp(np.asarray(params["w"]), axis=0).max()))
        assert spreads[1] < 0.5 * spreads[0]
        assert spreads[-1] < far
        moved = np.abs(np.asarray(params["w"]).mean(0) - mean).max()
        assert moved < 0.02  # the first mean's own rounding, a step of its grid


def test_a_resized_anchor_is_the_same_for_all():
    tx = small_slamb(average_payload=UNIFORM)
    history = train(tx, random_tree(SHAPES, 0), gradients(4), "vmap")
    state = history[-1][1]
    for workers in (1, 3, 8):
        anchors = slamb_jax.resize(state, workers)[-1].anchor
        for name in SHAPES:
            want = np.asarray(state[-1].anchor[name])[:1]
            np.testing.assert_array_equal(
                anchors[name], np.broadcast_to(want, anchors[name].shape)
            )


def test_without_a_payload_the_state_is_what_it_was(tmp_path):
    plain, anchored = (small_slamb(average_payload=p) for p in (None, "bfloat16"))
    shapes = {name: shape for name, shape in SHAPES.items() if name != "empty"}
    params = random_tree(shapes, 0)
    names, more = (set(named(tx.init(params))) for tx in (plain, anchored))
    assert more - names == {f"[4].anchor['{name}']" for name in shapes}
    assert names < more
    state = stack((params, anchored.init(params)), N)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        got = checkpoints.restore(stack((params, anchored.init(params)), N)).state
        for a, b in zip(*map(jax.tree.leaves, (got, state)), strict=True):
            np.testing.assert_array_equal(a, b)
        with pytest.raises(ValueError, match=r"anchor.* is not expected"):
            checkpoints.restore(stack((params, plain.init(params)), N))


def test_buffers_may_be_donated():
    tx = slamb_jax.slamb(0.01, average_payload="bfloat16")
    params = random_tree(SHAPES, 0)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(params, tx.init(params))
    assert jnp.isfinite(step(params, state)[0]["w"]).all()


def test_injected():
    injected = optax.inject_hyperparams(
        slamb_jax.slamb, static_args=slamb_jax.STATIC_ARGS
    )(0.01, axis_name=AXIS, payload=UNIFORM, average_payload="bfloat16", min_size=20)
    want = slamb_jax.slamb(
        0.01, axis_name=AXIS, payload=UNIFORM, average_payload="bfloat16", min_size=20
    )
    with jax.numpy_dtype_promotion("standard"):
        runs = [
            train(tx, random_tree(SHAPES, 0), gradients(2), "vmap")[-1][0]
            for tx in (injected, want)
        ]
    close(*runs, 1e-6)
