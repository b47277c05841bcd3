"""JointSpar against what it must equal, and what its compiled step sends."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.workers import (
    AXIS,
    MAPPINGS,
    mesh_of,
    over_workers,
    random_tree,
    stack,
    train,
)

SHAPES = {"a": (6, 5), "b": (5, 7), "c": (7,), "d": (3, 3), "norm": (4,)}
LABELS = {"a": "one", "b": "two", "c": "two", "d": "three", "norm": None}
UNEVEN = {"one": np.log(0.8), "three": np.log(0.2), "two": np.log(0.4)}
UNEVEN = jax.tree.map(np.float32, UNEVEN)
N = 4
spar = functools.partial(slamb_jax.jointspar, 0.1, LABELS)
lars = functools.partial(slamb_jax.jointspar_lars, 0.1, LABELS)


def gradients(steps, *lead, seed=1):
    return [random_tree(SHAPES, seed + t, *lead) for t in range(steps)]


def averaged(tx):
    mean = optax.stateless(
        lambda grads, _: slamb_jax.average_parameters(grads, axis_name=AXIS)
    )
    return optax.chain(mean, tx)


RATE = optax.linear_schedule(0.2, 0.1, 5)
DENSE = {
    "sgd": (
        lambda **s: slamb_jax.jointspar(RATE, LABELS, 3, momentum=0.9, **s),
        lambda: optax.sgd(RATE, momentum=0.9),
    ),
    "nesterov": (
        lambda **s: slamb_jax.jointspar(0.1, LABELS, 3, nesterov=True, **s),
        lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    ),
    "plain": (
        lambda **s: slamb_jax.jointspar(0.1, LABELS, 3, momentum=0.0, **s),
        lambda: optax.sgd(0.1),
    ),
    "lars": (lambda **s: lars(3, **s), lambda: optax.lars(0.1)),
    "lars, all": (
        lambda **s: slamb_jax.jointspar_lars(
            RATE, LABELS, 3, weight_decay=0.01, trust_coefficient=0.1, eps=1e-3,
            weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
            trust_ratio_mask={name: name != "d" for name in SHAPES},
            momentum=0.8, nesterov=True, **s,
        ),
        lambda: optax.lars(
            RATE, weight_decay=0.01, trust_coefficient=0.1, eps=1e-3,
            weight_decay_mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
            trust_ratio_mask={name: name != "d" for name in SHAPES},
            momentum=0.8, nesterov=True,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_the_whole_budget_is_the_dense_optimizer(name):
    """To the last bit, operation by operation; compiled, XLA may fuse otherwise."""
    sparse, dense = (make() for make in DENSE[name])
    params = random_tree(SHAPES, 0)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        for tolerance in (0, 1e-6):
            jit = jax.jit if tolerance else lambda f: f
            p, q = params, params
            s, d = sparse.init(p), dense.init(q)
            close = functools.partial(
                np.testing.assert_allclose, rtol=tolerance, atol=tolerance
            )
            for g in gradients(4):
                with jax.disable_jit(not tolerance):
                    u, s = jit(sparse.update)(g, s, p)
                    v, d = jit(dense.update)(g, d, q)
                p, q = optax.apply_updates(p, u), optax.apply_updates(q, v)
                jax.tree.map(close, p, q)
        assert all(x == 0 for x in s.log_p.values())


@pytest.mark.parametrize(
    ("mapping", "sampling"), [("shard_map", "per_worker"), ("pmap", "shared")]
)
def test_the_whole_budget_on_many_workers(mapping, sampling):
    sparse = DENSE["lars, all"][0](axis_name=AXIS, sampling=sampling)
    grads = gradients(3, N)
    with jax.numpy_dtype_promotion("standard"):
        got = train(sparse, random_tree(SHAPES, 0), grads, mapping)
        dense = averaged(DENSE["lars, all"][1]())
        want = train(dense, random_tree(SHAPES, 0), grads, "vmap")
    for (p, _), (q, _) in zip(got, want, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-6, 1e-7), p, q)


def masked(grads, active):
    """What a model gives whose layers were skipped."""
    return {
        name: g
        if LABELS[name] is None
        else jnp.where(active[LABELS[name]], g, jnp.zeros_like(g))
        for name, g in grads.items()
    }


def naive(params, grads, states, budget, sampling, tx):
    """One step of n workers in NumPy's way: draws as the states have them."""
    n = len(states)
    draws = [jax.tree.map(bool, slamb_jax.active_layers(s)) for s in states]
    factors = [
        {k: draws[i][k] / float(jnp.exp(s.log_p[k])) for k in draws[i]} | {None: 1.0}
        for i, s in enumerate(states)
    ]
    shares = [
        {k: np.asarray(g[i]) * factors[i][LABELS[k]] for k, g in grads.items()}
        for i in range(n)
    ]
    mean = {k: np.mean([s[k] for s in shares], axis=0) for k in grads}
    wanted = {name for d in draws for name in d if d[name]}
    new, trace = {}, {}
    for k, x in params.items():
        still = LABELS[k] is not None and LABELS[k] not in wanted
        old = np.asarray(states[0].trace[k])
        trace[k] = old if still else 0.9 * old + mean[k]
        new[k] = x if still else x - 0.1 * trace[k]
    parts = {name: [k for k in grads if LABELS[k] == name] for name in draws[0]}
    norms = [
        {
            name: np.sqrt(sum(np.sum(np.square(grads[k][i])) for k in keys))
            for name, keys in parts.items()
        }
        for i in range(n)
    ]
    if sampling == "shared":
        both = {k: np.mean([x[k] for x in norms]) for k in norms[0]}
        norms = [both] * n
    log_p = []
    for state, active, norm in zip(states, draws, norms, strict=True):
        names = sorted(active)
        after, _ = slamb_jax.update_distribution(
            jnp.stack([state.log_p[k] for k in names]),
            jnp.asarray([norm[k] for k in names], jnp.float32),
            jnp.stack([active[k] for k in names]), state.max_norm,
            budget=budget, p_min=budget / 6, horizon=20,
        )  # fmt: skip
        log_p.append(dict(zip(names, after, strict=True)))
    return new, trace, log_p


@pytest.mark.parametrize(
    ("mapping", "sampling"),
    [(mapping, "shared") for mapping in MAPPINGS]
    + [("vmap", "per_worker"), ("shard_map", "per_worker")],
)
def test_every_mapping_follows_the_formulas(mapping, sampling):
    """Draws, weights, standing still, norms and probabilities, step by step."""
    budget = 1.5
    tx = spar(budget, axis_name=AXIS, sampling=sampling, horizon=20, seed=3)
    params = random_tree(SHAPES, 0)

    def step(grads, state, params):
        grads = masked(grads, slamb_jax.active_layers(state))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = over_workers(step, mapping, N)
    stacked, state = stack(params, N), stack(tx.init(params), N)
    skipped, apart = 0, 0
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)
    for g in gradients(12, N):
        states = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(N)]
        states = jax.tree.map(np.asarray, states)
        draws = [slamb_jax.active_layers(s) for s in states]
        apart += any(a != b for a, b in itertools.pairwise(draws))
        want, trace, log_p = naive(params, g, states, budget, sampling, tx)
        skipped += not all(any(d[k] for d in draws) for k in draws[0])
        stacked, state = run(g, state, stacked)
        for i in range(N):
            for k in params:
                close(stacked[k][i], want[k])
                close(state.trace[k][i], trace[k])
            for k in log_p[i]:
                close(state.log_p[k][i], log_p[i][k])
        params = {k: x[0] for k, x in stacked.items()}
    assert skipped > 2 if sampling == "shared" else apart > 8
    assert (apart == 0) == (sampling == "shared")


@pytest.mark.parametrize("sampling", ["shared", "per_worker"])
def test_the_estimator_is_unbiased(sampling):
    """Over many draws, from an uneven distribution, the mean is the gradient's."""
    draws = 4000
    tx = slamb_jax.jointspar(
        1.0, LABELS, 1.4, momentum=0.0, axis_name=AXIS, sampling=sampling
    )
    grads = random_tree(SHAPES, 1, N)
    state = tx.init(random_tree(SHAPES, 0))._replace(log_p=UNEVEN)

    def one(count, worker, g):
        mine = state._replace(count=count, worker=worker)
        return tx.update(masked(g, slamb_jax.active_layers(mine)), mine)[0]

    workers = jnp.arange(N) if sampling == "per_worker" else jnp.zeros(N, int)
    over = jax.vmap(one, in_axes=(None, 0, 0), axis_name=AXIS)
    updates = jax.jit(jax.vmap(lambda c: over(c, workers, grads)))(jnp.arange(draws))
    for name, u in updates.items():
        want = -np.mean(grads[name], axis=0)
        error = np.mean(u[:, 0], axis=0) - want
        deviation = np.std(u[:, 0], axis=0) / draws**0.5
        assert (np.abs(error) <= 5 * deviation + 1e-5).all()
        assert (deviation > 1e-6).all() == (LABELS[name] is not None)


@functools.cache
def report(sampling):
    tx = spar(1.5, axis_name=AXIS, sampling=sampling)
    params = random_tree(SHAPES, 0)
    args = stack((params, tx.init(params), params), N)
    return slamb_jax.wire_report(over_workers(tx.update, "shard_map", N).lower(*args))


def test_a_layer_that_nobody_drew_is_not_sent():
    """Each layer's exchange in a branch, its norm with it; outside, what has none."""
    found = report("shared").collectives
    assert sorted(c.elements for c in found if c.conditional) == [9 + 1, 30 + 1, 42 + 1]
    assert [c.elements for c in found if not c.conditional] == [4]
    assert {c.kind for c in found} == {"all-reduce"}


def test_what_private_draws_cost():
    """A bit per layer to know what anyone drew; and the norms stay at home."""
    found = report("per_worker").collectives
    assert sorted(c.elements for c in found if c.conditional) == [9, 30, 42]
    assert sum(c.elements for c in found if not c.conditional) == 4 + 3


def test_the_draw_is_that_of_the_distribution():
    tx, params = spar(1.5), random_tree(SHAPES, 0)
    state = tx.init(params)._replace(log_p=UNEVEN)
    draw = jax.vmap(lambda c: slamb_jax.active_layers(state._replace(count=c)))
    found = draw(jnp.arange(4000))
    for name, log_p in UNEVEN.items():
        assert jnp.mean(found[name]) == pytest.approx(np.exp(log_p), abs=0.03)
    pairs = jnp.corrcoef(jnp.stack([x.astype(jnp.float32) for x in found.values()]))
    assert float(jnp.abs(pairs - jnp.eye(3)).max()) < 0.06
    other = slamb_jax.active_layers(spar(1.5, seed=1).init(params))
    assert jax.tree.structure(other) == jax.tree.structure(found)


def test_a_run_does_not_recompile_and_keeps_the_budget():
    tx = slamb_jax.accumulate(optax.chain(optax.clip(1.0), lars(2.0, p_min=0.3)), 1)
    params = random_tree(SHAPES, 0)
    state = tx.init(params)

    @jax.jit
    def step(g, state, params):
        grads = masked(g, slamb_jax.active_layers(state))  # found inside the chain
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for g in gradients(20):
        params, state = step(g, state, params)
        p = slamb_jax.layer_probabilities(state)
        assert sum(p.values()) == pytest.approx(2.0, rel=1e-5)
        assert all(0.3 - 1e-6 <= x <= 1 for x in p.values())
    assert step._cache_size() == 1
    assert float(max(p.values()) - min(p.values())) > 0.05


def test_shared_draws_stay_alike_on_replicas():
    """Other gradients on every worker, one distribution, and the same parameters."""
    tx = lars(1.5, axis_name=AXIS, horizon=10)
    history = train(tx, random_tree(SHAPES, 0), gradients(10, N), "shard_map")
    for params, state in history:
        for x in jax.tree.leaves((params, state)):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))


@pytest.mark.parametrize("sampling", ["shared", "per_worker"])
def test_simulated_workers_take_the_same_steps(sampling):
    """Though under vmap both sides of a branch are computed."""
    tx = spar(1.5, axis_name=AXIS, sampling=sampling, horizon=10)
    params = random_tree(SHAPES, 0)

    def step(state, batch):
        params, opt_state = state
        grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), batch)
        grads = masked(grads, slamb_jax.active_layers(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), 0

    start = params, tx.init(params)
    mesh = mesh_of(N)
    both = (
        slamb_jax.replicate(start, mesh, AXIS),
        slamb_jax.simulated_replicas(start, N),
    )
    spread = slamb_jax.per_worker_step(step, mesh, AXIS)
    simulated = slamb_jax.simulated_step(step, N, AXIS)
    for g in gradients(6, N):
        both = spread(both[0], g)[0], simulated(both[1], g)[0]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), *both)


BAD = [
    ({"budget": 0}, r"budget .*\(0.0, inf\].*0"),
    ({"budget": 3.1}, r"budget .*\(0.0, 3\].*3.1"),
    ({"budget": "1"}, "budget .*'1'"),
    ({"p_min": 0.0}, "p_min .*0.0"),
    ({"p_min": 0.6}, "p_min must not exceed budget / D = 1.5 / 3 = 0.5, got 0.6"),
    ({"horizon": 0}, "horizon .*0"),
    ({"sampling": "private"}, "sampling .*shared, per_worker.*'private'"),
    ({"momentum": 1.0}, "momentum .*1.0"),
    ({"seed": 0.5}, "seed .*0.5"),
    ({"axis_name": ["data"]}, "axis_name .*data"),
    ({"learning_rate": "fast"}, "learning_rate .*'fast'"),
    ({"layers": dict.fromkeys(SHAPES)}, "layers must label at least one layer"),
    ({"layers": LABELS | {"a": 3}}, r"layers must have strings .* 3 at layers\['a'\]"),
    ({"layers": {"a": "one"}}, "layers must have the structure of the parameters"),
    ({"layers": LABELS | {"more": "four"}}, "layers must have the structure"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
@pytest.mark.parametrize("make", [slamb_jax.jointspar, slamb_jax.jointspar_lars])
def test_bad_input(make, settings, message):
    settings = {"learning_rate": 0.1, "layers": LABELS, "budget": 1.5} | settings
    with pytest.raises(ValueError, match=message):
        make(**settings).init(random_tree(SHAPES, 0))


LARS_BAD = [
    ({"weight_decay": -0.1}, "weight_decay .*-0.1"),
    ({"trust_coefficient": 0.0}, "trust_coefficient .*0.0"),
    ({"eps": -1.0}, "eps .*-1.0"),
]


@pytest.mark.parametrize(("settings", "message"), LARS_BAD)
def test_bad_input_of_lars(settings, message):
    with pytest.raises(ValueError, match=message):
        lars(1.5, **settings)


def test_more_bad_input():
    params = random_tree(SHAPES, 0)
    labels = {"a": {"w": "one"}, "b": ()}
    gone = {"a": {"w": jnp.ones(3)}, "b": ()}
    tx = slamb_jax.jointspar(0.1, lambda p: labels | {"b": "two"}, 1)
    with pytest.raises(ValueError, match="layers names 'two', of which there are no"):
        tx.init(gone)
    with pytest.raises(ValueError, match="params must be passed"):
        lars(1.5).update(params, lars(1.5).init(params))
    with pytest.raises(ValueError, match="axis_name='data' is not bound here"):
        lars(1.5, axis_name=AXIS).update(params, lars(1.5).init(params), params)
    with pytest.raises(ValueError, match=r"state must hold one state .* got 0"):
        slamb_jax.active_layers(optax.sgd(0.1).init(params))
    with pytest.raises(ValueError, match="got 2"):
        slamb_jax.layer_probabilities([spar(1.5).init(params)] * 2)
    with pytest.raises(ValueError, match=r"budget.*JOINTSPAR_STATIC_ARGS"):
        optax.inject_hyperparams(slamb_jax.jointspar, static_args=("layers",))(
            learning_rate=0.1, layers=LABELS, budget=1.5
        ).init(params)


def test_injected_hyperparameters():
    static = (*slamb_jax.JOINTSPAR_STATIC_ARGS, "weight_decay_mask", "trust_ratio_mask")
    tx = optax.inject_hyperparams(slamb_jax.jointspar_lars, static_args=static)(
        learning_rate=optax.linear_schedule(0.2, 0.1, 5), layers=LABELS, budget=2,
        weight_decay=0.1,
    )  # fmt: skip
    plain = slamb_jax.jointspar_lars(RATE, LABELS, 2, weight_decay=0.1)
    params = random_tree(SHAPES, 0)
    with jax.numpy_dtype_promotion("standard"):
        state, other = tx.init(params), plain.init(params)
        assert "weight_decay" in state.hyperparams
        for g in gradients(3):
            u, state = jax.jit(tx.update)(g, state, params)
            v, other = jax.jit(plain.update)(g, other, params)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), u, v)
