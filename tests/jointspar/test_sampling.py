"""JointSpar against dense optimizers and NumPy; the bytes of its compiled step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax import jointspar
from slamb_jax.jointspar.distribution import update_distribution
from tests.close import assert_close, assert_same_bits
from tests.optimizers import random_tree
from tests.workers import AXIS, MAPPINGS, over_workers, stack

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
    "weight_decay": 0.01, "trust_coefficient": 0.1, "eps": 1e-3, "momentum": 0.8,
    "weight_decay_mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
    "trust_ratio_mask": {name: name != "d" for name in SHAPES}, "nesterov": True,
}  # fmt: skip
PARTS = {name: "sgd" if name in ("b", "norm") else "adam" for name in SHAPES}
DENSE = {
    "sgd": optax.sgd(RATE, momentum=0.9),
    "lars": optax.lars(RATE, **LARS),
    "parts": optax.partition({"adam": optax.adam(0.1), "sgd": SGD}, PARTS),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=RATE),
}


@pytest.mark.parametrize("name", DENSE)
@jax.numpy_dtype_promotion("standard")  # optax's schedules need it
def test_the_full_budget_is_the_dense_optimizer(name):
    """To the last bit operation by operation; compiled, XLA may fuse differently."""
    dense, sparse = DENSE[name], spar(3, tx=DENSE[name])
    for jit in (False, True) if name in ("sgd", "parts") else (True,):
        p, q = PARAMS, PARAMS
        s, d = sparse.init(p), dense.init(q)
        updates = [jax.jit(tx.update) if jit else tx.update for tx in (sparse, dense)]
        for g in gradients(3 if jit else 2):
            with jax.disable_jit(not jit):
                u, s = updates[0](g, s, p)
                v, d = updates[1](g, d, q)
            p, q = optax.apply_updates(p, u), optax.apply_updates(q, v)
            (assert_close if jit else assert_same_bits)((p, s.inner), (q, d))
    assert all(x == 0 for x in s.log_p.values())


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


BUDGET, HORIZON = 1.5, 20
LEARNING = {"budget": BUDGET, "p_min": BUDGET / 6, "horizon": HORIZON}
draws_of = jax.jit(jax.vmap(jointspar.active_layers))
after = jax.jit(jax.vmap(functools.partial(update_distribution, **LEARNING)))


def naive(params, grads, state, draws, sampling):
    """One step of all workers in NumPy; the trace in their states is the same."""
    share = {k: draws[k] / np.exp(state.log_p[k]) for k in draws} | {None: np.ones(N)}
    new, trace = {}, {}
    for k, x in params.items():
        weights = share[LABELS[k]].reshape(N, *[1] * x.ndim)
        old, moves = state.inner[0].trace[k][0], weights.any()
        trace[k] = 0.9 * old + np.mean(grads[k] * weights, 0) if moves else old
        new[k] = x - 0.1 * trace[k] if moves else x
    squares = dict.fromkeys((*draws, None), 0)
    for k, g in grads.items():
        squares[LABELS[k]] = squares[LABELS[k]] + np.square(g).reshape(N, -1).sum(1)
    norms = [np.sqrt(squares[name]) for name in draws]
    if sampling == "shared":
        norms = [np.full(N, x.mean()) for x in norms]
    columns = [*state.log_p.values()], norms, [*draws.values()]
    log_p, _ = after(*(np.stack(x, 1) for x in columns), state.max_norm)
    return new, trace, dict(zip(draws, log_p.T, strict=True))


EVERY = [(mapping, "shared") for mapping in MAPPINGS]
EVERY += [("shard_map", "per_worker"), ("vmap", "per_worker")]


@pytest.mark.parametrize(("mapping", "sampling"), EVERY)
def test_every_mapping_follows_the_formulas(mapping, sampling):
    """Draws, weights, layers that stand still, norms and probabilities.

    Under vmap both branches may be computed. The parameters stay equal on all workers,
    and so does all of the state if shared.
    """
    tx = spar(BUDGET, MANY, sampling=sampling, horizon=HORIZON, seed=3)

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
        want, trace, log_p = naive(start, g, host, draws, sampling)
        params, state = run(g, state, params)
        got = jax.device_get((params, state.inner[0].trace))
        assert_close(got, stack((want, trace), N))
        assert_close(state.log_p, log_p, floor=1.0)
        same = (got, jax.device_get(state)) if sampling == "shared" else got
        for x in jax.tree.leaves(same):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
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
    found = jointspar.layer_probabilities(tx.init(PARAMS))
    assert found == dict.fromkeys(UNEVEN, pytest.approx(0.5))
