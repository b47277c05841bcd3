"""JointSpar against dense optimizers and NumPy; its distribution; its bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import LinearConstraint, minimize

import slamb_jax
from slamb_jax import jointspar
from slamb_jax.jointspar import distribution
from tests.close import assert_close, assert_workers_agree
from tests.optimizers import random_tree
from tests.workers import AXIS, MAPPINGS, over_workers, stack, train

SHAPES = {"a": (6, 5), "b": (5, 7), "c": (7,), "d": (3, 3), "norm": (4,)}
LABELS = {"a": "one", "b": "two", "c": "two", "d": "three", "norm": None}
UNEVEN = {"one": 0.8, "three": 0.2, "two": 0.4}
UNEVEN = {name: np.float32(np.log(p)) for name, p in UNEVEN.items()}
N = 4
PARAMS = random_tree(SHAPES, 0)
SGD = optax.sgd(0.1, momentum=0.9)
ONE, MANY = slamb_jax.Exchange(payload=None), slamb_jax.Exchange(AXIS)


def spar(budget, exchange=ONE, tx=SGD, **settings):
    return jointspar.jointspar(tx, exchange, LABELS, budget, **settings)


def gradients(steps, *lead):
    return [random_tree(SHAPES, 1 + t, *lead) for t in range(steps)]


def masked(grads, active):
    """The gradients of a model whose inactive layers are skipped."""
    active = active | {None: True}
    return {k: jnp.where(active[LABELS[k]], g, 0 * g) for k, g in grads.items()}


RATE = optax.linear_schedule(0.2, 0.1, 5)
LARS = {
    "weight_decay": 0.01, "momentum": 0.8,
    "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
    "trust_ratio_mask": {name: name != "d" for name in SHAPES},
}  # fmt: skip
PARTS = {name: "sgd" if name in ("b", "norm") else "adam" for name in SHAPES}
DENSE = {
    "lars": optax.lars(RATE, **LARS),
    "parts": optax.partition({"adam": optax.adam(0.1), "sgd": SGD}, PARTS),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
}


@pytest.mark.parametrize("name", DENSE)
@jax.numpy_dtype_promotion("standard")  # optax's schedules need it
def test_the_full_budget_is_the_dense_optimizer(name):
    """But for how XLA fuses it."""
    dense, sparse = DENSE[name], spar(3, tx=DENSE[name])
    got, want = (train(x, PARAMS, gradients(3, 1), "vmap") for x in (sparse, dense))
    for (p, s), of_dense in zip(got, want, strict=True):
        assert_close((p, s.inner), of_dense)
        assert not any(s.log_p.values())


@pytest.mark.parametrize("name", ["lars", "parts"])
@jax.numpy_dtype_promotion("standard")
def test_a_layer_that_stands_still_keeps_its_parts_of_the_state(name):
    """So does a parameter without a gradient: one of a layer's two, the only one."""
    tx = spar(1.5, tx=DENSE[name])
    _, state = jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)
    chances = {"one": 1e-6, "two": 1.0, "three": 1.0}
    state = state._replace(log_p={k: jnp.log(p) for k, p in chances.items()})
    grads = gradients(1)[0] | {"b": None, "d": None}
    u, after = jax.jit(tx.update)(grads, state, PARAMS)
    still = {k for k in SHAPES if u[k] is None or not u[k].any()}
    assert still == {"a", "b", "d"}
    rows = jax.tree_util.tree_leaves_with_path(state.inner)
    for (path, old), new in zip(rows, jax.tree.leaves(after.inner), strict=True):
        at = {getattr(key, "key", None) for key in path}
        assert (old != new).any() == (not at & still), path


project = jax.jit(distribution.project_distribution)


def projected(*problem):
    log_q = project(*(jnp.asarray(x, jnp.float32) for x in problem))
    return np.asarray(jnp.exp(log_q), np.float64)


def learned(p, norms, active, largest, budget, p_min, horizon):
    """The probabilities of jointspar's docstring, in float64, and L."""
    largest = max([largest, *norms[active]])
    rate = np.sqrt(2 * budget * np.log(p.size / budget) / (horizon * p.size))
    alpha = p_min**2 / (largest or 1.0) ** 2 * rate  # 0: none was drawn yet
    loss = -(norms**2) / p**2 + largest**2 / p_min**2
    log_w = np.where(active, np.log(p) - alpha * loss / p, np.log(p))
    return projected(log_w, budget, p_min), largest


LEARNING = {"budget": 1.5, "p_min": 0.1, "horizon": 20}
draws_of = jax.jit(jax.vmap(jointspar.active_layers))


def naive(params, grads, state, draws, sampling):
    """One step of all workers in NumPy; the trace in their states is the same."""
    share = {k: draws[k] / np.exp(state.log_p[k]) for k in draws} | {None: np.ones(N)}
    squares, new, trace = dict.fromkeys(share, 0.0), {}, {}
    for k, x in params.items():
        weights = share[LABELS[k]].reshape(N, *[1] * x.ndim)
        old, moves = state.inner[0].trace[k][0], weights.any()
        trace[k] = 0.9 * old + np.mean(grads[k] * weights, 0) if moves else old
        new[k] = x - 0.1 * trace[k] if moves else x
        squares[LABELS[k]] += np.square(grads[k]).reshape(N, -1).sum(1)
    norms = [np.sqrt(squares[name]) for name in draws]
    if sampling == "shared":
        norms = [np.full(N, x.mean()) for x in norms]
    p = [np.exp(np.float64(x)) for x in state.log_p.values()]
    columns = (np.stack(x, 1) for x in (p, norms, [*draws.values()]))
    rows = zip(*columns, state.max_norm, strict=True)
    p, largest = zip(*(learned(*row, **LEARNING) for row in rows), strict=True)
    return new, trace, dict(zip(draws, np.stack(p, 1), strict=True)), largest


EVERY = [(mapping, "shared") for mapping in MAPPINGS]
EVERY += [("shard_map", "per_worker"), ("vmap", "per_worker")]


@pytest.mark.parametrize(("mapping", "sampling"), EVERY)
def test_every_mapping_follows_the_formulas(mapping, sampling):
    """Draws, weights, layers that stand still, norms and probabilities.

    Under vmap both branches may be computed. The parameters stay equal on all workers,
    and so does all of the state if shared.
    """
    tx = spar(exchange=MANY, sampling=sampling, seed=3, **LEARNING)

    def step(grads, state, params):
        grads = masked(grads, jointspar.active_layers(state))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = over_workers(step, mapping, N)
    params, state = stack(PARAMS, N), stack(tx.init(PARAMS), N)
    skipped, apart = 0, 0
    for g in gradients(12, N):
        g, host, start = jax.device_get((g, state, params))
        draws = jax.device_get(draws_of(host))
        apart += any(x.any() and not x.all() for x in draws.values())
        skipped += not all(x.any() for x in draws.values())
        start = {k: x[0] for k, x in start.items()}
        want, trace, p, largest = naive(start, g, host, draws, sampling)
        params, state = run(g, state, params)
        got = jax.device_get((params, state.inner[0].trace))
        assert_close(got, stack((want, trace), N))
        assert_close(jax.tree.map(np.exp, state.log_p), p)
        assert_close(state.max_norm, np.float32(largest))
        same = (got, jax.device_get(state)) if sampling == "shared" else got
        assert_workers_agree(same)
    assert skipped > 2 if sampling == "shared" else apart > 8
    assert (apart == 0) == (sampling == "shared")


@pytest.mark.parametrize(
    ("sampling", "in_branches", "always"),
    [
        ("shared", [9 + 1, 30 + 1, 42 + 1], 4),  # each layer's norm with it
        ("per_worker", [9, 30, 42], 4 + 3),  # a flag per layer for what anyone drew
    ],
)
def test_a_layer_that_nobody_drew_is_not_sent(sampling, in_branches, always):
    tx = spar(1.5, MANY, sampling=sampling)
    args = stack((PARAMS, tx.init(PARAMS), PARAMS), N)
    step = over_workers(tx.update, "shard_map", N)
    found = slamb_jax.wire_report(step.lower(*args)).collectives
    assert {c.kind for c in found} == {"all-reduce"}
    assert sorted(c.elements for c in found if c.conditional) == in_branches
    assert sum(c.elements for c in found if not c.conditional) == always


@pytest.mark.parametrize("sampling", ["shared", "per_worker"])
def test_the_draw_is_that_of_the_distribution(sampling):
    """So that what is weighed by one over the chance is right on average."""
    state = spar(1.5, MANY, sampling=sampling).init(PARAMS)._replace(log_p=UNEVEN)

    @functools.partial(jax.vmap, in_axes=(None, 0, 0))
    def draw_from(state, count, worker):
        mine = state._replace(count=count, worker=worker)
        return jointspar.active_layers(mine)

    width = N if sampling == "per_worker" else 1
    counts, workers = jnp.divmod(jnp.arange(4000), width)
    drawn = jax.jit(draw_from)(state, counts, workers)
    for name, log_p in UNEVEN.items():
        assert jnp.mean(drawn[name]) == pytest.approx(np.exp(log_p), abs=0.03)
    pairs = jnp.corrcoef(jnp.stack([x.astype(jnp.float32) for x in drawn.values()]))
    assert float(jnp.abs(pairs - jnp.eye(3)).max()) < 0.06
    other = draw_from(state._replace(seed=jnp.int32(1)), counts[:50], workers[:50])
    assert any((x[:50] != other[k]).any() for k, x in drawn.items())


def test_the_state_is_found_inside_of_others():
    tx = spar(1.5)
    around = slamb_jax.accumulate(optax.chain(optax.clip(1.0), tx), 1)
    for find in (jointspar.active_layers, jointspar.layer_probabilities):
        assert find(around.init(PARAMS)) == find(tx.init(PARAMS))


def problem(seed):
    rng = np.random.default_rng(seed)
    layers = rng.choice([2, 5, 11])
    budget = rng.uniform(0.1, 0.95) * layers
    p_min = rng.uniform(0.02, 1.0) * budget / layers
    return rng.normal(0, rng.choice([0.3, 2.0, 5.0]), layers), budget, p_min


def divergence(q, log_w):
    return np.sum(q * (np.log(q) - log_w) - q + np.exp(log_w))


def test_the_projection_is_the_minimum_that_a_general_optimizer_finds():
    for log_w, budget, p_min in map(problem, range(20)):
        q = projected(log_w, budget, p_min)
        assert np.sum(q) == pytest.approx(budget, rel=2e-6)
        assert ((q >= p_min * (1 - 1e-6)) & (q <= 1)).all()
        sums = LinearConstraint(np.ones(log_w.size), budget, budget)
        found = minimize(
            divergence, np.full_like(log_w, budget / log_w.size), args=(log_w,),
            jac=lambda q, log_w: np.log(q) - log_w, method="SLSQP",
            bounds=[(p_min, 1)] * log_w.size, constraints=sums,
            options={"maxiter": 500, "ftol": 1e-13},
        )  # fmt: skip
        assert found.success
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


def test_a_norm_that_is_not_finite_counts_as_not_drawn_and_zeros_stay():
    settings = {"budget": 3.0, "p_min": 0.1, "horizon": 50}
    learn = jax.jit(functools.partial(distribution.update_distribution, **settings))
    log_p, seen = jnp.log(jnp.array([0.7, 0.8, 0.7, 0.8])), jnp.float32(1)
    norms = jnp.array([1.0, jnp.nan, 2.0, jnp.inf])
    drawn = jnp.array([True, False, True, False])
    got = learn(log_p, norms, jnp.ones(4, bool), seen)
    want = learn(log_p, jnp.where(drawn, norms, 1.0), drawn, seen)
    np.testing.assert_array_equal(got[0], want[0])
    assert got[1] == want[1] == 2
    log_p, none = jnp.log(jnp.full(6, 0.5)), jnp.zeros(6)
    log_p, largest = learn(log_p, none, none == 0, jnp.float32(0))
    np.testing.assert_allclose(jnp.exp(log_p), 0.5, rtol=1e-5)
    assert largest == 0
