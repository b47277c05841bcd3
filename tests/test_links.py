"""Each link alone: equal to what is known, and nothing gets lost in it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slamb_jax
from slamb_jax.selections import Leaf, Strided
from tests.close import assert_close
from tests.forms import FORMS
from tests.masks import of_elements
from tests.naive import NaiveSlamb
from tests.optimizers import plain, random_tree
from tests.test_naive import MAKE
from tests.test_naive import SHAPES as SOME_SHAPES
from tests.workers import AXIS, MAPPINGS, over_workers, stack, stepper, train

SHAPES = {"w": (12, 16), "b": (16,), "conv": (2, 3, 4, 5), "scale": ()}
ALONE = plain()


@pytest.mark.parametrize("make", FORMS)
@pytest.mark.parametrize("axis_name", [None, AXIS])
def test_one_worker_that_exchanges_all_is_optax_lamb(make, axis_name):
    exchange = plain(axis_name, compress_ratio=1.0)
    grads = [random_tree(SHAPES, t, 1) for t in range(8)]
    params = random_tree(SHAPES, 99)
    params["conv"] = jnp.zeros_like(params["conv"])
    for weight_decay in (0.0, 0.1):
        tx = FORMS[make](
            0.01, exchange, form="product", c_min=0.0, c_max=float("inf"),
            weight_decay=weight_decay,
        )  # fmt: skip
        got = train(tx, params, grads, "vmap")
        with jax.numpy_dtype_promotion("standard"):
            lamb = optax.lamb(0.01, weight_decay=weight_decay)
            want = train(lamb, params, grads, "vmap")
        # optax rounds 1 - 0.999**t, which is 6e-5 off at t = 1, of a step of 1/100.
        assert_close([p for p, _ in got], [p for p, _ in want], units=64, floor=0.2)


def test_mask_momentum_of_one_worker_is_adam():
    tx = slamb_jax.mask_momentum(ALONE, slamb_jax.directions.adam())
    grads = [random_tree(SHAPES, t, 1) for t in range(5)]
    params = random_tree(SHAPES, 99)
    got = train(tx, params, grads, "vmap")
    with jax.numpy_dtype_promotion("standard"):
        want = train(optax.scale_by_adam(), params, grads, "vmap")
    # 1 - 0.999**t is rounded in optax: 6e-5 of steps of 1, five times.
    assert_close([p for p, _ in got], [p for p, _ in want], units=2500)


DRAWN = {
    "name": st.sampled_from(sorted(MAKE)),
    "shapes": SOME_SHAPES,
    "n": st.sampled_from([1, 2, 5]),
    "ratio": st.sampled_from([1.0, 0.9, 0.5, 0.3, 0.1, 0.02]),
    "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    "seed": st.integers(0, 99),
}


def draw(shapes, dtype, seed, *lead):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(*lead, *s)).astype(dtype)) for s in shapes]


@given(**DRAWN)
def test_exchanged_plus_kept_is_what_there_was(name, shapes, n, ratio, dtype, seed):
    """Of each worker, of x = g + e: what it sends and what it keeps, at every step."""
    exchange = plain(AXIS, selection=MAKE[name](ratio, 0, seed))
    tx = slamb_jax.randk_compress_with_error_feedback(exchange)
    step = over_workers(tx.update, "vmap", n)
    state = stack(tx.init(draw(shapes, dtype, 0)), n)
    for t in range(4):
        g, before = draw(shapes, dtype, t, n), state
        updates, state = step(g, before)
        for g_, e, kept, got in zip(
            g, before.residual, state.residual, updates, strict=True
        ):
            assert got.dtype == dtype
            x = np.asarray(g_, np.float32) + np.asarray(e)
            kept, got = np.asarray(kept), np.asarray(got, np.float64)
            sent = x.astype(np.float64) - kept
            # Exact in this dtype; all receive the mean, rounded to it once.
            np.testing.assert_array_equal(sent, sent.astype(dtype).astype(np.float64))
            largest = np.abs(x).max(initial=0.0)
            room = 2 * float(jnp.finfo(dtype).eps) * largest
            np.testing.assert_allclose(got - sent.mean(0), 0, atol=room)
            if dtype == "float32":  # an element is exchanged or kept
                assert ((kept == 0) | (kept == x)).all()
            unsent = (got == 0) & (x != 0) & (sent == 0)
            np.testing.assert_array_equal(kept[unsent], x[unsent])


@given(**DRAWN)
def test_the_mean_momentum_is_that_of_dense_adam(name, shapes, n, ratio, dtype, seed):
    """Exchanged or not, nothing of a gradient is lost."""
    mu_dtype = "float32" if dtype == "float16" else dtype
    exchange = plain(AXIS, selection=MAKE[name](ratio, 0, seed))
    tx = slamb_jax.scale_by_slamb(exchange, mu_dtype=mu_dtype)
    grads = [draw(shapes, "float32", t, n) for t in range(5)]
    history = train(tx, draw(shapes, "float32", 99), grads, "vmap")
    eps = float(jnp.finfo(mu_dtype).eps)
    dense = [np.zeros(s) for s in shapes]
    for (_, state), g in zip(history, grads, strict=True):
        for j, mu in enumerate(state.mu):
            dense[j] = 0.9 * dense[j] + 0.1 * np.asarray(g[j], np.float64).mean(0)
            mean = np.asarray(mu, np.float64).mean(0)
            np.testing.assert_allclose(mean, dense[j], atol=8 * eps, rtol=0)


@pytest.mark.parametrize(
    ("every", "mapping"), [(3, "shard_map"), (1, "vmap"), (None, "vmap")]
)
def test_the_average_of_parameters_at_its_steps(every, mapping):
    n = 4
    tx = slamb_jax.average_parameters_every(plain(AXIS, sync_every=every))
    params = random_tree(SHAPES, 0, n)
    state, step = stack(tx.init(random_tree(SHAPES, 0)), n), stepper(tx, mapping, n)
    for t in range(1, 8):
        u = random_tree(SHAPES, t, n, scale=0.1)
        moved = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), params, u)
        params, state = step(u, state, params)
        if every is not None and t % every == 1 % every:
            moved = jax.tree.map(lambda x: np.stack([x.mean(0)] * n), moved)
        assert_close(params, moved)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_average_parameters_gives_all_workers_the_same_bits(mapping):
    n = 8
    large = random_tree({"w": (33, 7)}, 0, n)["w"] * 1e3
    params = {
        dtype: large.astype(dtype) for dtype in ("float32", "bfloat16", "float16")
    }
    others = {"empty": jnp.zeros((n, 0, 2)), "count": jnp.full((n,), 7, jnp.int32)}
    mean = over_workers(lambda p: slamb_jax.average_parameters(p, AXIS), mapping, n)
    out = jax.tree.map(np.asarray, mean(params | others))
    for dtype, x in params.items():
        got = out[dtype]
        assert got.dtype == dtype
        assert len({worker.tobytes() for worker in got}) == 1
        assert_close(got[0], np.asarray(x, np.float64).mean(0), units=8)
    np.testing.assert_array_equal(out["count"], 7)


@pytest.mark.parametrize("large", ["sent", "kept", "only sent", "only kept"])
def test_ratios_where_one_part_dwarfs_the_other(large):
    """The small part must not drown in the rounding of the large one."""
    selection, leaf = Strided(0.25, 0), Leaf(0, (8, 9))
    mask = of_elements(selection.age(jnp.int32(1), leaf), (8, 9))
    rest = 0.0 if large.startswith("only") else 1e-4
    p = np.where(mask == large.endswith("sent"), 1e3, rest).astype(np.float32)
    g = p[::-1, ::-1].copy()
    for form in ("sum", "product"):
        naive = NaiveSlamb(
            [p], 1, lr=0.5, b1=0.9, b2=0.999, b3=0.5, eps=1e-6, c_min=0.01, c_max=1e9,
            weight_decay=0.0, decays=[True], form=form, sync_every=None,
            bias_correction=True,
        )  # fmt: skip
        naive.step([[g]], [mask])
        for make in FORMS.values():
            exchange = plain(selection=selection, b3=0.5)
            tx = make(0.5, exchange, form=form, c_max=1e9)
            update = jax.jit(tx.update)
            updates, _ = update(jnp.asarray(g), tx.init(p), jnp.asarray(p))
            # Entry by entry: 1 - 0.999 in float32 is 6e-5 off.
            np.testing.assert_allclose(updates, naive.p[0][0] - p, rtol=2e-4, atol=1e-7)


def test_the_largest_count_is_not_the_last():
    """Else the same coordinates would be exchanged for ever."""
    exchange = plain(compress_ratio=0.5, min_size=0, sync_every=3, b3=0.5)
    params = {"w": jnp.ones((4, 6))}
    for tx in (
        slamb_jax.slamb(0.1, exchange),
        slamb_jax.adamw(0.1, exchange),
        slamb_jax.randk_compress_with_error_feedback(exchange),
        slamb_jax.elementwise_rescale(exchange),
        slamb_jax.train_in_bfloat16(slamb_jax.sgd(0.1, exchange)),
    ):
        state, ours = tx.init(params), []
        of_steps = jax.tree.map(
            lambda x: x if x.ndim else jnp.full_like(x, 2**31 - 2), state
        )
        for _ in range(3):
            updates, of_steps = tx.update(params, of_steps, params)
            assert jnp.isfinite(updates["w"]).all()
            ours.append(
                [int(x) for x in jax.tree.leaves(of_steps) if x.dtype == jnp.int32]
            )
        assert ours[0]
        assert set(ours[0]) == {2**31 - 1}
        assert set(ours[1]) <= {2**30, 2**31 - 1}  # optax's schedules stand still
        assert (2**30 + 1) in ours[2]


def test_schedules_count_steps_from_zero():
    rate = optax.piecewise_constant_schedule(1.0, {1: 0.0})
    params = jnp.ones((3, 2))
    for make in FORMS.values():
        tx = make(rate, ALONE, weight_decay=rate, form="product")
        state = tx.init(params)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
            update = jax.jit(tx.update)
            first, state = update(params, state, params)
            second, _ = update(params, state, params)
        assert jnp.all(first != 0)
        assert jnp.all(second == 0)
