"""Each link alone, and the chain against known optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.naive import NaiveSlamb
from tests.workers import AXIS, MAPPINGS, over_workers, random_tree, stack, train

SHAPES = {"w": (12, 16), "b": (16,), "conv": (2, 3, 4, 5), "scale": ()}


def close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)


@pytest.mark.parametrize("axis_name", [None, AXIS])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_one_worker_sending_all_is_optax_lamb(axis_name, weight_decay):
    tx = slamb_jax.slamb(
        0.01, axis_name=axis_name, compress_ratio=1.0, form="product", c_min=0.0,
        c_max=float("inf"), weight_decay=weight_decay,
    )  # fmt: skip
    grads = [random_tree(SHAPES, t, 1) for t in range(20)]
    params = random_tree(SHAPES, 99)
    params["conv"] = jnp.zeros_like(params["conv"])
    got = train(tx, params, grads, "vmap")
    with jax.numpy_dtype_promotion("standard"):
        want = train(optax.lamb(0.01, weight_decay=weight_decay), params, grads, "vmap")
    for (a, _), (b, _) in zip(got, want, strict=True):
        close(a, b)


def test_mask_momentum_around_nothing_is_adam():
    tx = slamb_jax.mask_momentum(optax.identity(), eps=1e-8, form="product")
    grads = [random_tree(SHAPES, t, 1) for t in range(5)]
    params = random_tree(SHAPES, 99)
    got = train(tx, params, grads, "vmap")
    with jax.numpy_dtype_promotion("standard"):
        want = train(optax.scale_by_adam(), params, grads, "vmap")
    for (a, _), (b, _) in zip(got, want, strict=True):
        close(a, b, 5e-5)  # 1 - 0.999**t is rounded in optax


def test_no_bias_correction_is_plain_moments():
    tx = slamb_jax.mask_momentum(
        optax.identity(), form="product", bias_correction=False
    )
    g = jnp.array([3.0, -4.0])
    u, _ = tx.update(g, tx.init(g), g)
    m, v = 0.1 * g, 0.001 * g**2
    np.testing.assert_allclose(u, m / (jnp.sqrt(v) + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("nu_of", ["gradient", "momentum", "larger"])
def test_v_where_a_worker_has_no_gradient(nu_of):
    """As under a ReLU that its samples leave off: what others send it has no scale."""
    tx = slamb_jax.mask_momentum(
        slamb_jax.randk_compress_with_error_feedback(
            slamb_jax.Strided(1.0), axis_name=AXIS, keep_residual=False
        ),
        nu_of=nu_of,
    )
    grads = [{"w": jnp.stack([jnp.zeros(3), jnp.ones(3)])}]
    ((moved, _),) = train(tx, {"w": jnp.zeros(3)}, grads, "vmap")
    bound = 1 / (1 - 0.999) ** 0.5
    assert moved["w"].max() > 1e3 if nu_of == "gradient" else moved["w"].max() < bound


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_compression_conserves_what_there_was(mapping):
    """Sent plus kept is gradient plus what was kept before, in every dtype."""
    n = 4
    tx = slamb_jax.randk_compress_with_error_feedback(
        slamb_jax.Strided(0.25, 0), axis_name=AXIS
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        params = {"w": jnp.zeros((6, 7), dtype)}
        state = stack(tx.init(params), n)
        update = over_workers(lambda g, s: tx.update(g, s), mapping, n)
        kept = np.zeros((n, 6, 7), np.float32)
        for t in range(6):
            g = random_tree({"w": (6, 7)}, t, n)["w"].astype(dtype)
            u, state = update({"w": g}, state)
            assert u["w"].dtype == dtype
            there_was = np.asarray(g, np.float32) + kept
            kept = np.asarray(state.residual["w"])
            sent = there_was - kept  # exactly what travelled, of this dtype
            np.testing.assert_array_equal(sent, sent.astype(dtype).astype(np.float32))
            travelled = np.asarray(u["w"], np.float32)
            rtol = 1e-6 if dtype == jnp.float32 else 1e-2
            np.testing.assert_allclose(travelled[0], sent.mean(0), rtol, 1e-6)
            np.testing.assert_array_equal(travelled, travelled[:1].repeat(n, 0))


def test_error_feedback_converges_where_dropping_does_not():
    """Classical sparse SGD: workers whose gradients disagree, and a shared optimum."""
    n, d = 4, 40
    rng = np.random.default_rng(0)
    # Which coordinates a step sends is tied to its gradient: dropping is then biased.
    wave = jnp.asarray(rng.normal(size=(n, 8, 5)), jnp.float32)
    selection = slamb_jax.Strided(0.25, 0)

    def distance(tx, steps=800):
        def train_one(centre):
            def step(carry, t):
                x, state = carry
                season = jnp.where(t % 4 == 0, 5.0, -1.0)
                g = x - centre + season
                u, state = tx.update(g, state, x)
                return (optax.apply_updates(x, u), state), None

            x = jnp.zeros((8, 5))
            steps_ = jnp.arange(steps)
            return jax.lax.scan(step, (x, tx.init(x)), steps_)[0][0]

        x = jax.vmap(train_one, axis_name=AXIS)(wave)[0]
        return float(jnp.linalg.norm(x - wave.mean(0) + 0.5)) / d**0.5

    feedback = slamb_jax.randk_compress_with_error_feedback(selection, axis_name=AXIS)
    keep = optax.chain(feedback, optax.sgd(0.01))

    def forget(updates, state, params=None):
        u, state = feedback.update(updates, state, params)
        return u, state._replace(residual=jax.tree.map(jnp.zeros_like, state.residual))

    dropping = optax.GradientTransformation(feedback.init, forget)
    drop = optax.chain(dropping, optax.sgd(0.01))
    dense = optax.chain(
        optax.stateless(lambda g, p: slamb_jax.average_parameters(g, AXIS)),
        optax.sgd(0.01),
    )
    exact = distance(dense)
    assert distance(keep) < exact + 0.1
    assert distance(drop) > exact + 0.5


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("every", [1, 3, None])
def test_average_every(every, mapping):
    n = 4
    tx = slamb_jax.average_parameters_every(every, AXIS)
    params = random_tree(SHAPES, 0, n)
    state = stack(tx.init(random_tree(SHAPES, 0)), n)
    update = over_workers(tx.update, mapping, n)
    for t in range(1, 8):
        u = random_tree(SHAPES, t, n, scale=0.1)
        updates, state = update(u, state, params)
        there = jax.tree.map(jnp.add, params, u)
        if every is not None and t % every == 1 % every:
            there = jax.tree.map(lambda x: jnp.mean(x, 0, keepdims=True), there)
            there = jax.tree.map(lambda x: jnp.repeat(x, n, 0), there)
        params = jax.tree.map(jnp.add, params, updates)
        close(params, there)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_average_parameters_leaves_the_same_bits(mapping, dtype):
    n = 8
    params = {
        "w": (random_tree({"w": (33, 7)}, 0, n)["w"] * 1e3).astype(dtype),
        "empty": jnp.zeros((n, 0, 2), dtype),
        "count": jnp.full((n,), 7, jnp.int32),
    }
    mean = over_workers(lambda p: slamb_jax.average_parameters(p, AXIS), mapping, n)
    out = jax.tree.map(np.asarray, mean(params))
    assert out["w"].dtype == dtype
    bits = out["w"].view(np.uint32 if dtype == "float32" else np.uint16)
    np.testing.assert_array_equal(bits, bits[:1].repeat(n, 0))
    want = np.asarray(params["w"], np.float64).mean(0)
    rtol = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(out["w"][0].astype(np.float64), want, rtol, 1e-2)
    np.testing.assert_array_equal(out["count"], 7)


@pytest.mark.parametrize("form", ["sum", "product"])
@pytest.mark.parametrize("large", ["sent", "kept", "only sent", "only kept"])
def test_ratios_where_one_part_dwarfs_the_other(form, large):
    """The small part must not drown in the rounding of the whole."""
    selection, leaf = slamb_jax.Strided(0.25, 0), slamb_jax.Leaf(0, 0, (8, 9), 72)
    mask = np.asarray(selection.mask(jnp.int32(1), leaf)).reshape(8, 9)
    rest = 0.0 if large.startswith("only") else 1e-4
    p = np.where(mask == large.endswith("sent"), 1e3, rest).astype(np.float32)
    g = p[::-1, ::-1].copy()
    naive = NaiveSlamb(
        [p], 1, lr=0.5, b1=0.9, b2=0.999, b3=0.5, eps=1e-6, c_min=0.01, c_max=1e9,
        weight_decay=0.0, decays=[True], form=form, sync_every=None,
        bias_correction=True,
    )  # fmt: skip
    tx = slamb_jax.slamb(0.5, selection=selection, form=form, b3=0.5, c_max=1e9)
    state = tx.init(jnp.asarray(p))
    naive.step([[g]], [mask])
    updates, _ = tx.update(jnp.asarray(g), state, jnp.asarray(p))
    np.testing.assert_allclose(updates, naive.p[0][0] - p, rtol=2e-4, atol=1e-7)


def test_schedules_count_steps_from_zero():
    seen = optax.piecewise_constant_schedule(1.0, {1: 0.0})
    tx = slamb_jax.slamb(seen, weight_decay=seen, form="product")
    params = jnp.ones((3, 2))
    state = tx.init(params)
    with jax.numpy_dtype_promotion("standard"):  # the schedule needs it
        first, state = tx.update(jnp.ones_like(params), state, params)
        second, _ = tx.update(jnp.ones_like(params), state, params)
    assert jnp.all(first != 0)
    assert jnp.all(second == 0)


def test_state_is_moments_and_counts():
    params = {"a": jnp.zeros((300, 70)), "b": jnp.zeros((70,)), "c": jnp.zeros(())}
    bytes_of = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))  # noqa: E731
    state = slamb_jax.slamb(0.01).init(params)
    assert bytes_of(state) <= 2.01 * bytes_of(params) + 1024
    half = slamb_jax.slamb(0.01, mu_dtype=jnp.bfloat16).init(params)
    assert bytes_of(half) <= 1.51 * bytes_of(params) + 1024
