"""Laying replicas out, stepping them, averaging them into one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import slamb_jax
from slamb_jax.workers.mesh import replicated
from slamb_jax.workers.replicas import mean_replica
from tests.close import assert_close
from tests.optimizers import (
    random_tree,
    standard_promotion,
    step_on_gradients,
    train_step,
)
from tests.workers import AXIS, P, mesh_of

N = 8
EXCHANGE, ALONE = slamb_jax.Exchange(AXIS), slamb_jax.Exchange()
EXPLICIT, AUTO = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto


def test_replicas_start_equal_on_their_own_devices():
    mesh = mesh_of(N)
    tree = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.ones(4, jnp.bfloat16),
        "count": jnp.int32(3),
        "key": jax.random.key(0),
        "number": 2.5,
        "none": None,
    }
    out = slamb_jax.replicate(tree, mesh, EXCHANGE)
    assert out["w"].shape == (N, 2, 3)
    there = jax.sharding.NamedSharding(mesh, P(AXIS))
    assert out["w"].sharding.is_equivalent_to(there, 3)
    assert out["half"].dtype == jnp.bfloat16
    assert out["key"].shape == (N,)
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)
    back = slamb_jax.consolidate(out)
    np.testing.assert_array_equal(back["w"], tree["w"])
    assert (back["count"], back["count"].dtype) == (3, jnp.int32)
    assert back["key"] == jax.random.fold_in(tree["key"], 0)
    assert len(back["w"].devices()) == 1
    traced = jax.eval_shape(lambda: slamb_jax.replicate(tree, mesh, EXCHANGE))
    assert jax.tree.map(jnp.shape, traced) == jax.tree.map(jnp.shape, out)


def dropped(key):
    return jax.random.bernoulli(key, 0.5, (64,))


def of_masks(graph):
    """Dropout by a key of the state, by nnx, and by words, which stay equal."""

    def step(state, batch):
        layer = nnx.merge(graph, state["modules"])
        own, equal = state["key"], jax.random.wrap_key_data(state["words"])
        masks = jnp.stack([dropped(own), layer(batch) == 0, dropped(equal)])
        new = {"key": jax.random.split(own)[0], "modules": nnx.state(layer)}
        return state | new, masks

    return step


@pytest.mark.parametrize("simulated", [True, False])
def test_no_two_workers_draw_the_same_masks(simulated):
    graph, modules = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(3)))
    words = jax.random.key_data(jax.random.key(1))
    state = {"key": jax.random.key(0), "modules": modules, "words": words}
    if simulated:
        run = slamb_jax.simulated_step(of_masks(graph), N, EXCHANGE)
        state = slamb_jax.simulated_replicas(state, N)
    else:
        run = slamb_jax.per_worker_step(of_masks(graph), mesh_of(N), EXCHANGE)
        state = slamb_jax.replicate(state, mesh_of(N), EXCHANGE)
    for _ in range(2):
        with standard_promotion():
            state, masks = run(state, jnp.ones(64 * N))
        distinct = [len(np.unique(masks[:, i], axis=0)) for i in range(3)]
        assert distinct == [N, N, 1]


def noisy_step(tx):
    """Reports the loss, and the noise that the worker's own key gave."""

    def step(state, batch, key):
        noise = 0.01 * jax.random.normal(key, batch.shape)
        loss = lambda p, x: jnp.mean((x @ p["w"]) ** 2)  # noqa: E731
        state, value = train_step(tx, loss)(state, batch + noise)
        return state, {"loss": value, "noise": noise[0, 0]}

    return step


EACH, ALL = {"x": "other", "y": "other"}, "other"


def beside(other, rest=EACH):
    """AdamW on a matrix, and another optimizer on the rest of the parameters."""
    label = {"w": "ours", "b": rest}
    both = {"ours": slamb_jax.adamw(0.05, EXCHANGE), "other": other}
    return optax.multi_transform(both, label)


IN_FLOAT32 = dataclasses.replace(EXCHANGE, payload=None)


def averaging(tx):
    return optax.chain(tx, slamb_jax.average_parameters_every(IN_FLOAT32))


WARM_UP = optax.linear_schedule(0.0, 0.1, 3)
BESIDE = {
    "drifts": (beside(optax.adam(0.1)), 1),
    "drifts later": (beside(optax.sgd(WARM_UP)), 2),
    "drifts under one label": (beside(optax.adam(0.1), ALL), 1),
    "frozen": (beside(optax.set_to_zero()), None),
    "is ours too": (beside(slamb_jax.sgd(0.1, EXCHANGE)), None),
    "is ours under one label": (beside(slamb_jax.sgd(0.1, EXCHANGE), ALL), None),
    "is of another kind": (slamb_jax.muon(0.05, EXCHANGE), None),
    "is averaged after all": (averaging(beside(optax.adam(0.1))), None),
}


@pytest.mark.parametrize(("tx", "refused"), BESIDE.values(), ids=BESIDE)
def test_parameters_that_no_average_gets_may_not_drift_apart(tx, refused):
    def loss(p, batch):
        return jnp.mean((batch @ p["w"] + p["b"]["x"] - p["b"]["y"]) ** 2)

    def step(state, batch):  # beside a sum of gradients, which is each worker's own
        pair = state["params"], state["opt"]
        (params, opt), value = train_step(tx, loss)(pair, batch)
        grads = jax.grad(loss)(params, batch)
        summed = jax.tree.map(jnp.add, state["sum"], grads)
        return {"opt": opt, "params": params, "sum": summed}, value

    params = random_tree({"w": (4, 1)}, 0) | {
        "b": {"x": jnp.ones(()), "y": jnp.ones(())}
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    with standard_promotion():
        state = {"opt": tx.init(params), "params": params, "sum": zeros}
        state = slamb_jax.replicate(state, mesh_of(N), EXCHANGE)
        run = slamb_jax.per_worker_step(step, mesh_of(N), EXCHANGE)
        for t in range(1, 6):
            batch = np.random.default_rng(t).normal(size=(16, 4)).astype(np.float32)
            if t == refused:
                with pytest.raises(ValueError, match=r"\['b'\].* differ"):
                    run(state, batch)
                break
            state, _ = run(state, batch)


def test_a_rate_that_follows_the_mean_loss_is_the_same_for_all():
    """As the guide says; optax's conditionals do not pass the check of types."""
    plateau = optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    tx = optax.chain(slamb_jax.slamb(0.05, EXCHANGE), plateau)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        value = slamb_jax.average_parameters(value, AXIS)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return (optax.apply_updates(params, updates), opt_state), value

    mesh, params = mesh_of(N), jnp.ones((4, 3))
    state = slamb_jax.replicate((params, tx.init(params)), mesh, EXCHANGE)
    run = slamb_jax.per_worker_step(step, mesh, EXCHANGE, check_vma=False)
    batches = np.random.default_rng(0).normal(size=(8, 16, 4)).astype(np.float32)
    with standard_promotion():
        with pytest.raises(TypeError) as caught:
            slamb_jax.per_worker_step(step, mesh, EXCHANGE)(state, batches[0])
        assert "check_vma=False" in "".join(caught.value.__notes__)
        for t, batch in enumerate(batches):
            state, _ = run(state, batch * (1 + t))
    slamb_jax.assert_replicas_agree(state[1][1])
    assert state[1][1].scale[0] < 1


def mesh_with(kind, n=N):
    return jax.make_mesh((n,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:n])


@functools.cache
def trained(kind, check_vma):
    tx = slamb_jax.slamb(0.05, EXCHANGE)
    params = random_tree({"w": (4, 3)}, 0)
    mesh = mesh_with(kind)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, EXCHANGE)
    run = slamb_jax.per_worker_step(noisy_step(tx), mesh, EXCHANGE, check_vma=check_vma)
    reports = []
    for t in range(5):
        batch = np.random.default_rng(t).normal(size=(16, 4)).astype(np.float32)
        old = state
        state, report = run(state, batch, jax.random.key(t))
        assert jax.tree.leaves(old)[0].is_deleted()  # donated
        reports.append(report)
    return state, reports


@pytest.mark.parametrize(
    ("kind", "check_vma"), [(EXPLICIT, False), (AUTO, True), (AUTO, False)]
)
def test_every_kind_of_mesh_trains_the_same(kind, check_vma):
    """With keys and reports of each worker's own."""
    got, want = trained(kind, check_vma), trained(EXPLICIT, True)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    state, reports = got
    assert reports[0]["loss"].shape == (N,)
    assert len(np.unique(reports[0]["noise"])) == N
    start = random_tree({"w": (4, 3)}, 0)["w"]
    end = slamb_jax.consolidate(state[0])["w"]
    assert jnp.linalg.norm(end) < 0.95 * jnp.linalg.norm(start)


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
@pytest.mark.parametrize("n", [1, 4])
def test_arrays_on_a_mesh_of_the_other_kind_are_moved(kind, n):
    """Of the same devices; a mesh of one device is one too."""
    other = AUTO if kind == EXPLICIT else EXPLICIT
    mesh, theirs = mesh_with(kind, n), mesh_with(other, n)

    def step(state, batch):  # beside a number that is not changed
        return {"sum": state["sum"] + batch.sum(), "rest": state["rest"]}, batch

    run = slamb_jax.per_worker_step(step, mesh, EXCHANGE)
    there = jax.sharding.NamedSharding(theirs, P(AXIS))
    batch = jax.device_put(jnp.ones(8), there)
    state = {"sum": jnp.zeros(()), "rest": jnp.zeros(2)}
    state, _ = run(slamb_jax.replicate(state, theirs, EXCHANGE), batch)
    assert state["sum"].tolist() == [8 / n] * n
    state, _ = run(state, jnp.ones(8))  # on one device, not on a mesh
    assert state["sum"].tolist() == [16 / n] * n


@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_it_can_be_traced_like_any_jitted_function(kind):
    tx, mesh = optax.sgd(0.1), mesh_with(kind)
    run = slamb_jax.per_worker_step(noisy_step(tx), mesh, EXCHANGE)
    params = {"w": jnp.ones((4, 3))}
    state = slamb_jax.replicate((params, tx.init(params)), mesh, EXCHANGE)
    shapes = jax.tree.map(jnp.shape, state)
    batch, key = jnp.ones((16, 4)), jax.random.key(0)
    lowered = run.lower(state, batch, key).out_info[0]
    assert jax.tree.map(lambda x: x.shape, lowered) == shapes

    def two_steps(state):
        return jax.lax.scan(lambda s, x: run(s, x, key), state, jnp.stack([batch] * 2))

    assert jax.tree.map(jnp.shape, jax.jit(two_steps)(state)[0]) == shapes


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_under_nnx_jit_is_the_step():
    """On parameters as nnx has them; whole loops, in linen too, are in the guide."""
    graph, params = nnx.split(nnx.Linear(6, 1, rngs=nnx.Rngs(0)))
    tx, mesh = slamb_jax.adamw(0.03, EXCHANGE), mesh_of(4)

    def loss_of(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    step = slamb_jax.per_worker_step(train_step(tx, loss_of), mesh, EXCHANGE)
    batch = {"x": jnp.arange(48.0).reshape(8, 6) / 48, "y": jnp.ones((8, 1))}
    ends = []
    for run in (step, nnx.jit(step)):
        state = slamb_jax.replicate((params, tx.init(params)), mesh, EXCHANGE)
        ends.append(jax.tree.map(np.asarray, run(state, batch)))
    assert_close(*ends)
    net = nnx.merge(graph, slamb_jax.consolidate(ends[0][0])[0])
    assert net(jnp.ones((2, 6))).shape == (2, 1)


def whole_surface(mesh, simulates):
    """Each function of the library that takes a mesh, or arrays that lie on one."""
    tx = slamb_jax.skip_not_finite(slamb_jax.adamw(0.1, EXCHANGE), EXCHANGE)
    params = random_tree({"w": (4, 3)}, 0)
    batch, key = jnp.ones((16, 4)), jax.random.key(0)
    begun = {"key": key, "pair": (params, tx.init(params))}

    def step(state, batch, key):
        pair, report = noisy_step(tx)(state["pair"], batch, key)
        return state | {"pair": pair}, report

    state = slamb_jax.replicate(begun, mesh, EXCHANGE)
    fresh = slamb_jax.consolidate(state)
    run = slamb_jax.per_worker_step(step, mesh, EXCHANGE)
    assert run.lower(state, batch, key).out_info
    state, report = run(state, batch, key)
    for rtol in (0.0, 1e-3):
        slamb_jax.assert_replicas_agree(state["pair"][0], rtol)
    slamb_jax.check_finite(state, 0)
    agreement = slamb_jax.momentum_agreement(state)
    mapped = slamb_jax.on_workers(slamb_jax.adamw(0.1, EXCHANGE), mesh, EXCHANGE)
    replicas = slamb_jax.replicate(params, mesh, EXCHANGE)
    updates, _ = jax.jit(mapped.update)(replicas, mapped.init(replicas), replicas)
    ends = [state["pair"], report, updates]
    if simulates:
        simulated, _ = slamb_jax.simulated_step(step, mesh.size, EXCHANGE)(
            slamb_jax.simulated_replicas(begun, mesh.size), batch, key
        )
        slamb_jax.assert_replicas_agree(simulated["pair"][0])
        ends.append(simulated["pair"])
    return fresh["pair"], slamb_jax.consolidate(ends), agreement


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="jax 0.7 has use_mesh alone")
@pytest.mark.parametrize("kind", [EXPLICIT, AUTO])
def test_all_works_under_set_mesh(kind):
    mesh = mesh_with(kind, 4)
    # There jax 0.12 compiles no all-reduce over an axis of vmap.
    simulates = kind is not EXPLICIT or jax.__version_info__ < (0, 12)
    want = whole_surface(mesh, simulates)
    with jax.set_mesh(mesh):
        assert_close(whole_surface(mesh, simulates), want)


def test_consolidate_is_the_mean_and_exact_where_replicas_agree():
    x = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    got = slamb_jax.consolidate({"batch_stats": {"mean": jnp.asarray(x)}})
    np.testing.assert_allclose(
        got["batch_stats"]["mean"], x.mean(0), rtol=1e-5, atol=1e-6
    )
    same = jnp.asarray(np.repeat(x[:1], 3, 0))  # (a + a + a) / 3 is not always a
    np.testing.assert_array_equal(slamb_jax.consolidate(same), x[0])
    half = slamb_jax.consolidate(same.astype(jnp.bfloat16))
    np.testing.assert_array_equal(half, x[0].astype(jnp.bfloat16))


def test_consolidating_leaves_no_program_in_flight():
    """More than 32 programs in flight that communicate deadlock on CPU."""
    x = slamb_jax.replicate(jnp.ones((1000, 1000)), mesh_of(N), EXCHANGE)
    assert all(replicated(mean_replica, x + i).is_ready() for i in range(5))


BY_HAND = optax.stateless(
    lambda grads, params: jax.tree.map(lambda g: jax.lax.pmean(g, AXIS), grads)
)


def test_gradients_averaged_by_hand_need_no_exchange():
    """As a dense run has it, where no types tell that they were averaged."""
    tx, mesh = optax.chain(BY_HAND, slamb_jax.adamw(0.1, ALONE)), mesh_of(N)
    step, params = step_on_gradients(tx), random_tree({"w": (8, 4)}, 0)
    run = slamb_jax.per_worker_step(step, mesh, EXCHANGE, check_vma=False)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, EXCHANGE)
    state, _ = run(state, random_tree({"w": (8, 4)}, 1, N))
    slamb_jax.assert_replicas_agree(state)


SELDOM = slamb_jax.Exchange(AXIS, sync_every=2, outer=optax.sgd(1.0))
LONE = {
    "optax's optimizer": (optax.adamw(0.1), EXCHANGE, N, True),
    "one worker": (optax.adamw(0.1), EXCHANGE, 1, False),
    "by hand": (optax.chain(BY_HAND, optax.adamw(0.1)), EXCHANGE, N, False),
    "at times": (slamb_jax.adamw(0.1, SELDOM), SELDOM, N, False),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("tx", "exchange", "n", "warns"), LONE.values(), ids=LONE)
def test_workers_that_train_by_themselves_are_told(tx, exchange, n, warns, check_vma):
    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    def evaluate(state, batch):  # into a sum that is kept
        params, total = state
        return (params, total + loss(params, batch)), ()

    mesh, params = mesh_of(n), {"w": jnp.ones((4, 3))}
    step = train_step(tx, loss)
    run = slamb_jax.per_worker_step(step, mesh, exchange, check_vma=check_vma)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    batch = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    with standard_promotion():
        if warns:
            told = pytest.warns(UserWarning, match="communicates nothing over 'data'")
            with told as caught:
                state, _ = run(state, batch)
            assert caught[0].filename == __file__
        state, _ = run(state, batch)  # it is told once
        run = slamb_jax.per_worker_step(evaluate, mesh, EXCHANGE)
        run(slamb_jax.replicate((params, jnp.float32(0)), mesh, EXCHANGE), batch)


def test_an_optimizer_of_another_exchange_is_told():
    """Once, with both; not where one of several optimizers has that of the workers."""
    mesh, params, batch = mesh_of(2), {"w": jnp.ones((4, 3))}, np.ones((4, 4), "f4")
    finer = dataclasses.replace(EXCHANGE, payload="uniform8")
    one = slamb_jax.adamw(1e-2, finer)
    both = optax.chain(one, slamb_jax.mask_momentum(EXCHANGE))

    def loss(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2)

    def first_call(tx):
        step = train_step(tx, loss)
        run = slamb_jax.per_worker_step(step, mesh, EXCHANGE)
        return run, slamb_jax.replicate((params, tx.init(params)), mesh, EXCHANGE)

    run, state = first_call(one)
    with pytest.warns(UserWarning, match="uniform8.*and not by") as caught:
        state, _ = run(state, batch)
    assert caught[0].filename == __file__
    run(state, batch)  # warnings are errors
    run, state = first_call(both)
    run(state, batch)
