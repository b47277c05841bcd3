"""Laying replicas out, stepping them, averaging them into one."""

import dataclasses
import os
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
from tests.workers import AXIS, P, mesh_of, on_mesh

N = 8
EXCHANGE, ALONE = slamb_jax.Exchange(AXIS), slamb_jax.Exchange()
EXPLICIT, AUTO = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
KINDS = pytest.mark.parametrize("kind", [EXPLICIT, AUTO])


START = random_tree({"w": (4, 3), "b": (3,)}, 0)
OURS = slamb_jax.adamw(0.05, EXCHANGE)


def loss_of(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def batch_of(t):
    return np.random.default_rng(t).normal(size=(16, 4)).astype(np.float32)


def test_replicas_start_equal_on_their_own_devices():
    """Numbers of 64 bits that 32 hold are taken."""
    mesh = mesh_of(N)
    tree = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "half": np.array([np.nan, 1], jnp.bfloat16),
        "count": jnp.int32(3),
        "key": jax.random.key(0),
        "number": 2.5,
        "none": None,
        "wide": [np.int64(5), np.array([0.5, np.nan, -np.inf]), np.arange(3), 0.1, 7],
    }
    out = slamb_jax.replicate(tree, mesh, EXCHANGE)
    chex.assert_tree_shape_prefix(out, (N,))
    there = jax.sharding.NamedSharding(mesh, P(AXIS))
    assert out["w"].sharding.is_equivalent_to(there, 3)
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)
    for replicas in (out, slamb_jax.simulated_replicas(tree, N)):
        back = slamb_jax.consolidate(replicas)
        assert back.pop("key") == jax.random.fold_in(tree["key"], 0)
        want = {k: jax.tree.map(jnp.asarray, tree[k]) for k in back}
        chex.assert_trees_all_equal(back, want, strict=True)
        assert len(back["w"].devices()) == 1
    traced = jax.eval_shape(lambda: slamb_jax.replicate(tree, mesh, EXCHANGE))
    chex.assert_trees_all_equal_shapes_and_dtypes(traced, out)


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

    start, mesh = (START, tx.init(START)), mesh_of(N)
    run, state = on_mesh(step, start, mesh, EXCHANGE, check_vma=False)
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


@KINDS
@pytest.mark.parametrize("n", [1, 4])
def test_arrays_on_a_mesh_of_the_other_kind_are_moved(kind, n):
    """Of the same devices; a mesh of one device is one too."""
    theirs = mesh_with({AXIS: n}, AUTO if kind == EXPLICIT else EXPLICIT)

    def step(state, batch):  # beside a number that is not changed
        return {"sum": state["sum"] + batch.sum(), "rest": state["rest"]}, batch

    run = slamb_jax.per_worker_step(step, mesh_with({AXIS: n}, kind), EXCHANGE)
    batch = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(theirs, P(AXIS)))
    state = {"sum": jnp.zeros(()), "rest": jnp.zeros(2)}
    state, _ = run(slamb_jax.replicate(state, theirs, EXCHANGE), batch)
    assert state["sum"].tolist() == [8 / n] * n
    state, _ = run(state, jnp.ones(8))  # on one device, not on a mesh
    assert state["sum"].tolist() == [16 / n] * n


@KINDS
def test_it_can_be_traced_like_any_jitted_function(kind):
    """Loops of whole nnx models are in the guide."""
    tx, mesh = optax.sgd(0.1), mesh_with({AXIS: N}, kind)
    run, state = on_mesh(noisy_step(tx), (START, tx.init(START)), mesh, EXCHANGE)
    batch, key = jnp.ones((16, 4)), jax.random.key(0)

    def two_steps(state):
        return jax.lax.scan(lambda s, x: run(s, x, key), state, jnp.stack([batch] * 2))

    for new, _ in (jax.jit(two_steps)(state), nnx.jit(run)(state, batch, key)):
        chex.assert_trees_all_equal_shapes(new, state)


def whole_surface(mesh):
    """Each function of the library that takes a mesh, or arrays that lie on one."""
    tx = slamb_jax.skip_not_finite(OURS, EXCHANGE)
    step, batch, key = noisy_step(tx), batch_of(0), jax.random.key(0)
    start = START, tx.init(START)
    run, state = on_mesh(step, start, mesh, EXCHANGE)
    keys = slamb_jax.consolidate(slamb_jax.replicate(key, mesh, EXCHANGE))
    ends = [jax.random.key_data(keys), slamb_jax.consolidate(state)]
    assert run.lower(state, batch, key).out_info
    state, report = run(state, batch, key)
    for rtol in (0.0, 1e-3):
        slamb_jax.assert_replicas_agree(state[0], rtol)
    slamb_jax.check_finite(state, 0)
    mapped = slamb_jax.on_workers(OURS, mesh, EXCHANGE)
    replicas = slamb_jax.replicate(START, mesh, EXCHANGE)
    updates, _ = jax.jit(mapped.update)(replicas, mapped.init(replicas), replicas)
    ends += [slamb_jax.momentum_agreement(state), report, updates]
    if jax.__version_info__ < (0, 12):  # which compiles none under Explicit axes
        simulated = slamb_jax.simulated_step(step, mesh.size, EXCHANGE)
        replicas = slamb_jax.simulated_replicas(start, mesh.size)
        ends += simulated(replicas, batch, key)
    return ends


@KINDS
def test_all_works_under_set_mesh(kind):
    mesh = mesh_with({AXIS: 4}, kind)
    want = whole_surface(mesh)
    with jax.set_mesh(mesh):
        assert_close(whole_surface(mesh), want)


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


def by_hand(tx):
    """As a dense run has it; no types tell that gradients were averaged."""
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))
    return optax.chain(mean, tx)


def beside(other):
    """AdamW on a matrix, and another optimizer on the rest of the parameters."""
    both = {"ours": OURS, "other": other}
    return optax.multi_transform(both, {"w": "ours", "b": "other"})


IN_FLOAT32 = dataclasses.replace(EXCHANGE, payload=None)
AVERAGE = slamb_jax.average_parameters_every(IN_FLOAT32)
WARM_UP = optax.linear_schedule(0.0, 0.1, 3)
NODES, BOTH = slamb_jax.Exchange("node"), slamb_jax.Exchange(("node", AXIS))
SELDOM = slamb_jax.Exchange(AXIS, sync_every=2, outer=optax.sgd(1.0))
STEPPED = {  # an optimizer, the exchange, workers, and the call after which it is told
    "optax's optimizer": (optax.adamw(0.1), EXCHANGE, N, 1),
    "optax's beside ours": (beside(optax.adam(0.1)), EXCHANGE, N, 1),
    "later": (beside(optax.sgd(WARM_UP)), EXCHANGE, N, 2),
    "one axis of two": (slamb_jax.adamw(0.1, NODES), BOTH, N, 1),
    "one worker": (optax.adamw(0.1), EXCHANGE, 1, None),
    "by hand": (by_hand(optax.adamw(0.1)), EXCHANGE, N, None),
    "by hand before ours": (by_hand(slamb_jax.adamw(0.1, ALONE)), EXCHANGE, N, None),
    "at times": (slamb_jax.adamw(0.1, SELDOM), SELDOM, N, None),
    "both axes": (slamb_jax.adamw(0.1, BOTH), BOTH, N, None),
    "an axis of one": (slamb_jax.adamw(0.1, NODES), BOTH, 2, None),
    "ours beside ours": (beside(slamb_jax.sgd(0.1, EXCHANGE)), EXCHANGE, N, None),
    "frozen": (beside(optax.set_to_zero()), EXCHANGE, N, None),
    "averaged": (optax.chain(beside(optax.sgd(0.1)), AVERAGE), EXCHANGE, N, None),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("tx", "exchange", "n", "call"), STEPPED.values(), ids=STEPPED)
def test_parameters_that_no_average_gets_are_told(tx, exchange, n, call, monkeypatch):
    """Once by the step, after its first call or much later, and by the check."""
    monkeypatch.setattr(guards, "LATER", 2)
    step, start = train_step(tx, loss_of), (START, tx.init(START))
    mesh = mesh_of(n, exchange.axis_name)
    run, state = on_mesh(step, start, mesh, exchange, check_vma=False)
    for t in (1, 2):
        said = rf"after call {t} .* workers differ in state\[0\]\['b'\].* all: no"
        told = pytest.warns(UserWarning, match=said) if t == call else nullcontext([])
        with told as caught:
            state, _ = run(state, batch_of(t))
        assert all(x.filename == __file__ for x in caught)
    differ = pytest.raises(AssertionError, match=r"differ in .* leaves: \['b'\]")
    with differ if call else nullcontext():
        slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)


def test_only_the_first_call_and_one_much_later_take_sums(monkeypatch):
    """And find statistics of each worker's own, but not keys, which begin so."""
    counted, sums = [], agreement.checksums
    monkeypatch.setattr(guards, "LATER", 3)
    monkeypatch.setattr(
        agreement,
        "checksums",
        lambda leaves: counted.append(len(leaves)) or sums(leaves),
    )

    def step(state, batch):
        return {"own": batch.mean(), "key": jax.random.split(state["key"])[0]}, None

    start = {"own": jnp.zeros(()), "key": jax.random.key(0)}
    run, state = on_mesh(step, start, mesh_of(N), EXCHANGE)
    for t, taken in enumerate([2, 2, 3]):
        said = pytest.warns(UserWarning, match=r"differ in state\['own'\], which")
        with nullcontext() if t else said:
            state, _ = run(state, batch_of(t))
        assert counted == [2] * taken
