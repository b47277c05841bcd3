"""Laying replicas out, stepping them, averaging them into one."""

import dataclasses
import os
import warnings
from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import slamb_jax
from slamb_jax.workers import agreement, guards
from slamb_jax.workers.mesh import replicated
from slamb_jax.workers.replicas import mean_replica
from tests.close import assert_close
from tests.optimizers import random_tree, train_step
from tests.programs import finish, start
from tests.shards import mesh_4x2, mesh_with
from tests.workers import AXIS, P, mesh_of

N = 8
EXCHANGE, ALONE = slamb_jax.Exchange(AXIS), slamb_jax.Exchange()
EXPLICIT, AUTO = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
KINDS = pytest.mark.parametrize("kind", [EXPLICIT, AUTO])


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def batch_of(t):
    return np.random.default_rng(t).normal(size=(16, 4)).astype(np.float32)


def begun(tx, params, mesh=None, exchange=EXCHANGE):
    state = params, tx.init(params)
    return slamb_jax.replicate(state, mesh or mesh_of(N), exchange)


def per_worker(step, mesh=None, exchange=EXCHANGE, **settings):
    return slamb_jax.per_worker_step(step, mesh or mesh_of(N), exchange, **settings)


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
    chex.assert_tree_shape_prefix(out, (N,))
    there = jax.sharding.NamedSharding(mesh, P(AXIS))
    assert out["w"].sharding.is_equivalent_to(there, 3)
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)
    back = slamb_jax.consolidate(out)
    assert back.pop("key") == jax.random.fold_in(tree["key"], 0)
    want = {k: x for k, x in tree.items() if k != "key"} | {"number": jnp.array(2.5)}
    chex.assert_trees_all_equal(back, want, strict=True)
    assert len(back["w"].devices()) == 1
    traced = jax.eval_shape(lambda: slamb_jax.replicate(tree, mesh, EXCHANGE))
    chex.assert_trees_all_equal_shapes_and_dtypes(traced, out)


def test_numbers_of_64_bits_that_32_hold_are_taken():
    tree = {"n": np.int64(5), "x": np.array([0.5, np.nan, -np.inf]), "rate": 0.1}
    tree |= {"half": np.array([np.nan, 1], jnp.bfloat16), "all": np.arange(3), "t": 7}
    want = jax.tree.map(jnp.asarray, tree)
    out = slamb_jax.replicate(tree, mesh_of(N), EXCHANGE)
    for one in (out, slamb_jax.simulated_replicas(tree, N)):
        chex.assert_trees_all_equal(slamb_jax.consolidate(one), want)


def test_shards_that_become_whole_are_told():
    """Those whose specs are given are not gathered."""
    mesh, w = mesh_4x2(), jnp.arange(16.0).reshape(4, 4)
    for axes, specs, told in (
        ("model", None, True),
        ("model", {"w": P(None, "model")}, False),
        (AXIS, None, False),  # each worker has a copy of its own of these
    ):
        exchange = slamb_jax.Exchange(AXIS, param_specs=specs)
        there = jax.sharding.NamedSharding(mesh, P(None, axes))
        tree = {"w": jax.device_put(w, there)}
        said = r"tree\['w'\] is sharded over 'model', and .* param_specs"
        with pytest.warns(UserWarning, match=said) if told else nullcontext():
            out = slamb_jax.replicate(tree, mesh, exchange)["w"]
        assert out.sharding.shard_shape(out.shape) == (1, 4, 2 if specs else 4)
        np.testing.assert_array_equal(out, np.broadcast_to(w, (4, 4, 4)))


IN_FLOAT32 = dataclasses.replace(EXCHANGE, payload=None)
WARM_UP = optax.linear_schedule(0.0, 0.1, 3)


def beside(other):
    """AdamW on a matrix, and another optimizer on the rest of the parameters."""
    label = {"w": "ours", "b": "other"}
    both = {"ours": slamb_jax.adamw(0.05, EXCHANGE), "other": other}
    return optax.multi_transform(both, label)


def averaging(tx):
    return optax.chain(tx, slamb_jax.average_parameters_every(IN_FLOAT32))


BESIDE = {  # whether the other parameters agree after the first step, and the second
    "drifts": (beside(optax.adam(0.1)), False, False),
    "drifts later": (beside(optax.sgd(WARM_UP)), True, False),
    "frozen": (beside(optax.set_to_zero()), True, True),
    "is ours too": (beside(slamb_jax.sgd(0.1, EXCHANGE)), True, True),
    "is of another kind": (slamb_jax.muon(0.05, IN_FLOAT32), True, True),
    "is averaged after all": (averaging(beside(optax.adam(0.1))), True, True),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("tx", *"ab"), BESIDE.values(), ids=BESIDE)
def test_parameters_that_no_average_gets_are_found_to_differ(tx, a, b, monkeypatch):
    """Told once by the step, after its first call or much later, and by the check."""
    monkeypatch.setattr(guards, "LATER", 2)

    def loss(p, batch):
        return jnp.mean((batch @ p["w"] + p["b"]["x"] - p["b"]["y"]) ** 2)

    params = random_tree({"w": (4, 1)}, 0) | {"b": {k: jnp.ones(()) for k in "xy"}}
    state, run = begun(tx, params), per_worker(train_step(tx, loss))
    for t, (agrees, comes_apart) in enumerate([(a, not a), (b, a and not b)]):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, _ = run(state, batch_of(t))
        told = [str(x.message).split(" workers differ in ")[1] for x in caught]
        both = "state[0]['b']['x'], state[0]['b']['y']"
        of_parameters = [x for x in told if x.startswith("state[0]")]
        assert [x[: len(both)] for x in of_parameters] == [both] * comes_apart
        if agrees:
            slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)
            continue
        said = r"differ in 2 of 3 leaves: \['b'\]\['x'\] .*, \['b'\]\['y'\]"
        with pytest.raises(AssertionError, match=said):
            slamb_jax.assert_replicas_agree(state[0])


@pytest.mark.usefixtures("standard_promotion")
def test_a_rate_that_follows_the_mean_loss_is_the_same_for_all():
    """As the guide says; optax's conditionals need ``check_vma=False``."""
    plateau = optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    tx = optax.chain(slamb_jax.lamb(0.05, EXCHANGE), plateau)

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss_of)(params, batch)
        value = slamb_jax.average_parameters(value, AXIS)
        updates, opt_state = tx.update(grads, opt_state, params, value=value)
        return (optax.apply_updates(params, updates), opt_state), value

    state = begun(tx, {"w": jnp.ones((4, 3))})
    run = per_worker(step, check_vma=False)
    for t in range(8):
        state, _ = run(state, batch_of(t) * (1 + t))
    slamb_jax.assert_replicas_agree(state[1][1])
    assert state[1][1].scale[0] < 1


def noisy_step(tx):
    """Reports the loss, and the noise that the worker's own key gave."""

    def step(state, batch, key):
        noise = 0.01 * jax.random.normal(key, batch.shape)
        state, value = train_step(tx, loss_of)(state, batch + noise)
        return state, {"loss": value, "noise": noise[0, 0]}

    return step


START = random_tree({"w": (4, 3)}, 0)


@KINDS
@pytest.mark.parametrize("n", [1, 4])
def test_arrays_on_a_mesh_of_the_other_kind_are_moved(kind, n):
    """Of the same devices; a mesh of one device is one too."""
    theirs = mesh_with({AXIS: n}, AUTO if kind == EXPLICIT else EXPLICIT)

    def step(state, batch):  # beside a number that is not changed
        return {"sum": state["sum"] + batch.sum(), "rest": state["rest"]}, batch

    run = per_worker(step, mesh_with({AXIS: n}, kind))
    batch = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(theirs, P(AXIS)))
    state = {"sum": jnp.zeros(()), "rest": jnp.zeros(2)}
    state, _ = run(slamb_jax.replicate(state, theirs, EXCHANGE), batch)
    assert state["sum"].tolist() == [8 / n] * n
    state, _ = run(state, jnp.ones(8))  # on one device, not on a mesh
    assert state["sum"].tolist() == [16 / n] * n


@KINDS
def test_it_can_be_traced_like_any_jitted_function(kind):
    tx, mesh = optax.sgd(0.1), mesh_with({AXIS: N}, kind)
    run = per_worker(noisy_step(tx), mesh)
    state = begun(tx, {"w": jnp.ones((4, 3))}, mesh)
    batch, key = jnp.ones((16, 4)), jax.random.key(0)
    chex.assert_trees_all_equal_shapes(run.lower(state, batch, key).out_info[0], state)

    def two_steps(state):
        return jax.lax.scan(lambda s, x: run(s, x, key), state, jnp.stack([batch] * 2))

    chex.assert_trees_all_equal_shapes(jax.jit(two_steps)(state)[0], state)


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_under_nnx_jit_is_the_step():
    """On parameters as nnx has them; whole loops, in linen too, are in the guide."""
    graph, params = nnx.split(nnx.Linear(6, 1, rngs=nnx.Rngs(0)))
    tx, mesh = slamb_jax.adamw(0.03, EXCHANGE), mesh_of(4)

    def loss(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    step = per_worker(train_step(tx, loss), mesh)
    batch = {"x": jnp.arange(48.0).reshape(8, 6) / 48, "y": jnp.ones((8, 1))}
    got, want = (f(begun(tx, params, mesh), batch) for f in (nnx.jit(step), step))
    assert_close(got, want)
    net = nnx.merge(graph, slamb_jax.consolidate(got[0])[0])
    chex.assert_shape(net(jnp.ones((2, 6))), (2, 1))


def whole_surface(mesh, simulates):
    """Each function of the library that takes a mesh, or arrays that lie on one."""
    tx = slamb_jax.skip_not_finite(slamb_jax.adamw(0.1, EXCHANGE), EXCHANGE)
    batch, key = jnp.ones((16, 4)), jax.random.key(0)
    start = {"key": key, "pair": (START, tx.init(START))}

    def step(state, batch, key):
        pair, report = noisy_step(tx)(state["pair"], batch, key)
        return state | {"pair": pair}, report

    state = slamb_jax.replicate(start, mesh, EXCHANGE)
    fresh = slamb_jax.consolidate(state)
    run = per_worker(step, mesh)
    assert run.lower(state, batch, key).out_info
    state, report = run(state, batch, key)
    for rtol in (0.0, 1e-3):
        slamb_jax.assert_replicas_agree(state["pair"][0], rtol)
    slamb_jax.check_finite(state, 0)
    agreement = slamb_jax.momentum_agreement(state)
    mapped = slamb_jax.on_workers(slamb_jax.adamw(0.1, EXCHANGE), mesh, EXCHANGE)
    replicas = slamb_jax.replicate(START, mesh, EXCHANGE)
    updates, _ = jax.jit(mapped.update)(replicas, mapped.init(replicas), replicas)
    ends = [state["pair"], report, updates]
    if simulates:
        simulated, _ = slamb_jax.simulated_step(step, mesh.size, EXCHANGE)(
            slamb_jax.simulated_replicas(start, mesh.size), batch, key
        )
        slamb_jax.assert_replicas_agree(simulated["pair"][0])
        ends.append(simulated["pair"])
    return fresh["pair"], slamb_jax.consolidate(ends), agreement


@KINDS
def test_all_works_under_set_mesh(kind):
    mesh = mesh_with({AXIS: 4}, kind)
    # There jax 0.12 compiles no all-reduce over an axis of vmap.
    simulates = kind is not EXPLICIT or jax.__version_info__ < (0, 12)
    want = whole_surface(mesh, simulates)
    with jax.set_mesh(mesh):
        assert_close(whole_surface(mesh, simulates), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_equal_replicas_are_consolidated_to_their_bits(dtype):
    """The best loss so far begins infinite, a mask is, and p + -0.0 is p.

    And (a + a + a) / 3 is not always a.
    """
    largest = np.finfo(np.float16).max
    values = [np.inf, -np.inf, -0.0, 0.0, 1 / 3, largest, -largest, 1e-7]
    values += [*np.random.default_rng(0).normal(size=50)]
    for n in (2, 3):
        x = jnp.stack([jnp.array(values, dtype)] * n)
        got = np.asarray(slamb_jax.consolidate(x))
        assert got.tobytes() == np.asarray(x[0]).tobytes()


def test_consolidate_is_the_mean_and_does_not_leave_the_range():
    most = np.finfo(np.float32).max
    x = jnp.array([[most, np.inf, -most, 0.0, 1.0], [most / 2, 1.0, most, -0.0, 2.0]])
    got = slamb_jax.consolidate({"statistics": {"mean": x}})
    want = {"statistics": {"mean": np.float32([0.75 * most, np.inf, 0, 0, 1.5])}}
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_an_array_twice_in_a_state_or_beside_it_is_stepped_as_two():
    """In a process of its own, which jaxlib would end (SIGSEGV)."""
    flags = os.environ["XLA_FLAGS"]  # eight devices
    process = start("-W", "error", "-m", "tests.shared_arrays", XLA_FLAGS=flags)
    status, told = finish(process)
    assert status == 0, told


def test_consolidating_leaves_no_program_in_flight():
    """More than 32 programs in flight that communicate deadlock on CPU."""
    x = slamb_jax.replicate(jnp.ones((1000, 1000)), mesh_of(N), EXCHANGE)
    assert all(replicated(mean_replica, x + i).is_ready() for i in range(5))


BY_HAND = optax.stateless(
    lambda grads, params: jax.tree.map(lambda g: jax.lax.pmean(g, AXIS), grads)
)


def test_gradients_averaged_by_hand_need_no_exchange():
    """As a dense run has it, where no types tell that they were averaged."""
    tx = optax.chain(BY_HAND, slamb_jax.adamw(0.1, ALONE))
    state, run = begun(tx, START), per_worker(train_step(tx, loss_of), check_vma=False)
    state, _ = run(state, batch_of(0))
    slamb_jax.assert_replicas_agree(state)


NODES, BOTH = slamb_jax.Exchange("node"), slamb_jax.Exchange(("node", AXIS))
SELDOM = slamb_jax.Exchange(AXIS, sync_every=2, outer=optax.sgd(1.0))
LONE = {
    "optax's optimizer": (optax.adamw(0.1), EXCHANGE, N, AXIS),
    "one worker": (optax.adamw(0.1), EXCHANGE, 1, None),
    "by hand": (optax.chain(BY_HAND, optax.adamw(0.1)), EXCHANGE, N, None),
    "at times": (slamb_jax.adamw(0.1, SELDOM), SELDOM, N, None),
    "one axis of two": (slamb_jax.adamw(0.1, NODES), BOTH, N, AXIS),
    "both axes": (slamb_jax.adamw(0.1, BOTH), BOTH, N, None),
    "an axis of one": (slamb_jax.adamw(0.1, NODES), BOTH, 2, None),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("tx", "exchange", "n", "alone"), LONE.values(), ids=LONE)
def test_workers_that_train_by_themselves_are_told(tx, exchange, n, alone, check_vma):
    mesh, params, batch = mesh_of(n, exchange.axis_name), {"w": START["w"]}, batch_of(0)
    run = per_worker(train_step(tx, loss_of), mesh, exchange, check_vma=check_vma)
    state = begun(tx, params, mesh, exchange)
    if alone:
        told = r"after call 1 .* workers differ in state\[0\]\['w'\].*same on all: no"
        with pytest.warns(UserWarning, match=told) as caught:
            state, _ = run(state, batch)
        assert caught[0].filename == __file__
    run(state, batch)  # it is told once


def test_statistics_of_each_workers_own_are_told_and_others_are_not(monkeypatch):
    """Only after the first call and one much later, which alone take sums."""
    counted, sums = [], agreement.checksums
    monkeypatch.setattr(guards, "LATER", 4)
    monkeypatch.setattr(
        agreement,
        "checksums",
        lambda leaves: counted.append(len(leaves)) or sums(leaves),
    )

    def step(state, batch):
        own, key = batch.mean(), jax.random.split(state["key"])[0]
        late = jnp.where(state["count"] > 1, own, 0.0)
        mean = slamb_jax.average_parameters(own, AXIS)
        new = {"mean": mean, "own": own, "late": late, "key": key}
        return new | {"count": state["count"] + 1}, None

    zeros = dict.fromkeys(("mean", "own", "late"), jnp.zeros(()))
    start = zeros | {"count": jnp.int32(0), "key": jax.random.key(0)}
    state, run = slamb_jax.replicate(start, mesh_of(N), EXCHANGE), per_worker(step)
    for t, (name, taken) in enumerate([("own", 2), ("", 2), ("", 2), ("late", 3)]):
        said = pytest.warns(UserWarning, match=rf"differ in state\['{name}'\], which")
        with said if name else nullcontext():
            state, _ = run(state, batch_of(t))
        assert counted == [5] * taken
