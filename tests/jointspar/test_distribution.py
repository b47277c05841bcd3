"""The distribution over layers, against SciPy and the formulas as written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from slamb_jax.jointspar import distribution

project = jax.jit(distribution.project_distribution)
SETTINGS = {"budget": 3.0, "p_min": 0.1, "horizon": 50}
update = jax.jit(functools.partial(distribution.update_distribution, **SETTINGS))


def problem(seed):
    rng = np.random.default_rng(seed)
    layers = rng.choice([2, 5, 11])
    budget = rng.uniform(0.1, 0.95) * layers
    p_min = rng.uniform(0.02, 1.0) * budget / layers
    return rng.normal(0, rng.choice([0.3, 2.0, 5.0]), layers), budget, p_min


def projected(*problem):
    log_q = project(*(jnp.asarray(x, jnp.float32) for x in problem))
    return np.asarray(jnp.exp(log_q), np.float64)


def divergence(q, log_w):
    return np.sum(q * (np.log(q) - log_w) - q + np.exp(log_w))


def test_the_projection_is_the_minimum_that_a_general_optimizer_finds():
    for log_w, budget, p_min in map(problem, range(20)):
        q = projected(log_w, budget, p_min)
        assert np.sum(q) == pytest.approx(budget, rel=2e-6)
        assert (q >= p_min * (1 - 1e-6)).all()
        assert (q <= 1).all()
        found = minimize(
            divergence, np.full_like(log_w, budget / log_w.size), args=(log_w,),
            jac=lambda q, log_w: np.log(q) - log_w, method="SLSQP",
            bounds=[(p_min, 1)] * log_w.size,
            constraints={"type": "eq", "fun": lambda q, s=budget: np.sum(q) - s},
            options={"maxiter": 500, "ftol": 1e-13},
        )  # fmt: skip
        assert found.success
        assert divergence(q, log_w) <= found.fun + 1e-5
        np.testing.assert_allclose(q, found.x, atol=2e-4)


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e3, -1e4), (1e5, 0.0)])
def test_the_budget_is_kept_for_weights_that_no_float_can_hold(scale, shift):
    log_w = np.random.default_rng(0).normal(size=30) * scale + shift
    q = projected(log_w, 12.0, 0.01)
    assert q.sum() == pytest.approx(12.0, rel=1e-5)
    assert (np.diff(q[np.argsort(log_w)]) >= 0).all()
    # At either end of the budget there is no choice.
    assert (projected(log_w, 30, 0.1) == 1).all()
    np.testing.assert_allclose(projected(log_w, 3, 0.1), 0.1, rtol=1e-5)


def literal(p, norms, active, largest, *, budget, p_min, horizon):
    """The weights of jointspar's docstring, in float64, and L."""
    largest = max([largest, *norms[active]])
    rate = np.sqrt(2 * budget * np.log(p.size / budget) / (horizon * p.size))
    alpha = p_min**2 / largest**2 * rate
    loss = -(norms**2) / p**2 + largest**2 / p_min**2
    return np.where(active, np.log(p) - alpha * loss / p, np.log(p)), largest


def test_updates_follow_the_formulas():
    rng = np.random.default_rng(0)
    log_p, largest = jnp.log(jnp.full(7, 3 / 7)), jnp.float32(0)
    for _ in range(60):
        norms, active = rng.lognormal(size=7), rng.random(7) < 0.5
        p = np.exp(np.asarray(log_p, np.float64))
        log_w, want = literal(p, norms, active, float(largest), **SETTINGS)
        log_p, largest = update(log_p, norms.astype("float32"), active, largest)
        assert largest == pytest.approx(want, rel=1e-6)
        want = projected(log_w, SETTINGS["budget"], SETTINGS["p_min"])
        np.testing.assert_allclose(np.exp(log_p), want, rtol=1e-4)
    assert float(jnp.ptp(log_p)) > 0.1


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_norm_that_is_not_finite_counts_as_not_drawn_and_zeros_stay(bad):
    log_p, seen = jnp.log(jnp.array([0.7, 0.8, 0.7, 0.8])), jnp.float32(1)
    norms = jnp.array([1.0, bad, 2.0, 1.0])
    drawn = jnp.array([True, False, True, True])
    got = update(log_p, norms, jnp.ones(4, bool), seen)
    want = update(log_p, jnp.where(drawn, norms, 1.0), drawn, seen)
    np.testing.assert_array_equal(got[0], want[0])
    assert got[1] == want[1] == 2
    log_p, none = jnp.log(jnp.full(6, 0.5)), jnp.zeros(6)
    log_p, largest = update(log_p, none, none == 0, jnp.float32(0))
    np.testing.assert_allclose(jnp.exp(log_p), 0.5, rtol=1e-5)
    assert largest == 0
