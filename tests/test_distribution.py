"""The distribution over layers, against SciPy and the formulas as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import slamb_jax


def problem(seed):
    rng = np.random.default_rng(seed)
    layers = int(rng.choice([2, 5, 11]))
    budget = float(rng.uniform(0.1, 0.95)) * layers
    p_min = float(rng.uniform(0.02, 1.0)) * budget / layers
    log_w = rng.normal(0, rng.choice([0.3, 2.0, 5.0]), layers)
    return log_w, budget, p_min


project = jax.jit(slamb_jax.project_distribution)


def projected(log_w, *settings):
    log_w, *settings = (jnp.asarray(x, jnp.float32) for x in (log_w, *settings))
    return np.asarray(jnp.exp(project(log_w, *settings)), np.float64)


def divergence(q, log_w):
    return np.sum(q * (np.log(q) - log_w) - q + np.exp(log_w))


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_minimum_that_a_general_optimizer_finds(seed):
    log_w, budget, p_min = problem(seed)
    q = projected(log_w, budget, p_min)
    assert np.sum(q) == pytest.approx(budget, rel=2e-6)
    assert (q >= p_min * (1 - 1e-6)).all()
    assert (q <= 1).all()
    found = minimize(
        divergence, np.full_like(log_w, budget / log_w.size), args=(log_w,),
        jac=lambda q, log_w: np.log(q) - log_w, method="SLSQP",
        bounds=[(p_min, 1)] * log_w.size,
        constraints={"type": "eq", "fun": lambda q: np.sum(q) - budget},
        options={"maxiter": 500, "ftol": 1e-13},
    )  # fmt: skip
    assert found.success
    assert divergence(q, log_w) <= found.fun + 1e-5
    np.testing.assert_allclose(q, found.x, atol=2e-4)


def test_no_feasible_move_is_better():
    """Nearer than an iterative optimizer gets: along random directions."""
    rng = np.random.default_rng(0)
    for seed in range(100):
        log_w, budget, p_min = problem(1000 + seed)
        q = projected(log_w, budget, p_min)
        for _ in range(20):
            other = q + rng.normal(size=q.size) * 0.05
            other = np.clip(other, p_min, 1)
            other += (budget - other.sum()) / q.size
            if (other < p_min).any() or (other > 1).any():
                continue
            assert divergence(q, log_w) <= divergence(other, log_w) + 1e-5


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("shift", [0.0, -1e4])
def test_weights_that_no_float_can_hold(scale, shift):
    """A literal w would be 0 or infinite; the budget is kept all the same."""
    log_w = np.random.default_rng(0).normal(size=30) * scale + shift
    q = projected(log_w, 12.0, 0.01)
    assert np.isfinite(q).all()
    assert q.sum() == pytest.approx(12.0, rel=1e-5)
    order = np.argsort(log_w)
    assert (np.diff(q[order]) >= 0).all()


def test_the_whole_budget_is_one_for_each_to_the_last_bit():
    log_w = jnp.asarray(np.random.default_rng(0).normal(size=9), jnp.float32)
    assert (slamb_jax.project_distribution(log_w, 9, 0.1) == 0).all()
    least = projected(log_w, 0.9, 0.1)  # D p_min = s: no choice
    np.testing.assert_allclose(least, 0.1, rtol=1e-6)


def literal(p, norms, active, largest, budget, p_min, horizon):
    """The formulas of the docstring, in float64."""
    largest = max([largest, *norms[active]])
    rate = np.sqrt(2 * budget * np.log(p.size / budget) / (horizon * p.size))
    alpha = p_min**2 / largest**2 * rate
    loss = -(norms**2) / p**2 + largest**2 / p_min**2
    return np.where(active, np.log(p) - alpha * loss / p, np.log(p)), largest


def test_updates_follow_the_formulas():
    rng = np.random.default_rng(0)
    budget, p_min, horizon, layers = 3.0, 0.1, 50, 7
    settings = {"budget": budget, "p_min": p_min, "horizon": horizon}
    update = jax.jit(lambda *args: slamb_jax.update_distribution(*args, **settings))
    log_p, largest = jnp.log(jnp.full(layers, budget / layers)), jnp.float32(0)
    for _ in range(60):
        norms, active = rng.lognormal(size=layers), rng.random(layers) < 0.5
        p = np.exp(np.asarray(log_p, np.float64))
        log_w, want = literal(p, norms, active, float(largest), *settings.values())
        log_p, largest = update(
            log_p, jnp.asarray(norms, jnp.float32), jnp.asarray(active), largest
        )
        assert largest == pytest.approx(want, rel=1e-6)
        np.testing.assert_allclose(
            np.exp(log_p), projected(log_w, budget, p_min), rtol=1e-4
        )
    assert float(jnp.ptp(log_p)) > 0.1


def test_layers_of_large_gradients_gain():
    """With all layers seen each time, the order of the norms is that of p."""
    norms = jnp.array([4.0, 1.0, 2.0, 0.5])
    log_p, largest = jnp.log(jnp.full(4, 0.5)), jnp.float32(0)
    for _ in range(30):
        log_p, largest = slamb_jax.update_distribution(
            log_p, norms, jnp.ones(4, bool), largest,
            budget=2.0, p_min=0.2, horizon=300,
        )  # fmt: skip
    assert np.argsort(log_p).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_norm_that_is_not_finite_counts_as_not_drawn(bad):
    log_p, seen = jnp.log(jnp.array([0.5, 0.7, 0.8])), jnp.float32(1)
    both = [
        slamb_jax.update_distribution(
            log_p, jnp.array([1.0, x, 2.0]), jnp.array([True, drawn, True]), seen,
            budget=2.0, p_min=0.1, horizon=10,
        )
        for x, drawn in ((bad, True), (1.0, False))
    ]  # fmt: skip
    for a, b in zip(*both, strict=True):
        np.testing.assert_array_equal(a, b)


def test_no_gradient_at_all_gives_no_nan():
    log_p, largest = slamb_jax.update_distribution(
        jnp.log(jnp.full(3, 0.5)), jnp.zeros(3), jnp.ones(3, bool), jnp.float32(0),
        budget=1.5, p_min=0.1, horizon=10,
    )  # fmt: skip
    np.testing.assert_allclose(jnp.exp(log_p), 0.5, rtol=1e-5)
    assert largest == 0


SETTINGS = [
    (0.0, 0.1, r"budget .*\(0.0, 4\].*0.0"),
    (4.1, 0.1, "budget .*4.1"),
    (float("nan"), 0.1, "budget .*nan"),
    ("2", 0.1, "budget .*'2'"),
    (2.0, 0.0, "p_min .*0.0"),
    (2.0, 0.51, r"p_min must not exceed budget / D = 2.0 / 4 = 0.5, got 0.51"),
]


@pytest.mark.parametrize(("budget", "p_min", "message"), SETTINGS)
def test_bad_settings(budget, p_min, message):
    with pytest.raises(ValueError, match=message):
        slamb_jax.project_distribution(jnp.zeros(4), budget, p_min)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_weights_must_be_a_vector(shape):
    with pytest.raises(ValueError, match=r"log_w must have shape \(D,\)"):
        slamb_jax.project_distribution(jnp.zeros(shape), 1.0, 0.1)
