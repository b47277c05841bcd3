"""Groups of devices: gradients averaged within, momentum exchanged between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

import slamb_jax
from tests import optimizers
from tests.close import assert_near
from tests.optimizers import random_tree, train_step
from tests.workers import P, stack

ALONE = pytest.mark.filterwarnings("ignore:step changes most of the state")

G, D = 4, 2  # groups, devices of each
SHAPES = {"w": (24, 48), "b": (48,)}
OUTER, INNER = "node", "device"
UNIFORM8 = slamb_jax.payloads.StochasticUniform(8, 32)
UNIFORM4 = slamb_jax.payloads.StochasticUniform(4, 32)
RATIOS = {0: 0.5, 2: 0.25}
SETTINGS = {
    "plain": {},
    "16 bits": {"mu_dtype": "bfloat16", "form": "product"},
    "codes": {
        "payload": UNIFORM8, "average_payload": UNIFORM4, "compress_ratio": RATIOS
    },
    "rolling": {
        "rolling": True, "compress_ratio": 0, "average_payload": "ternary"
    },
    "floats": {"payload": "bfloat16", "average_payload": "bfloat16"},
}  # fmt: skip
# Sums in another order; and where that changes a rounding, a step of its grid.
ROUNDING = {
    "plain": 3e-6,
    "16 bits": 2e-2,
    "codes": 5e-2,
    "rolling": 5e-2,
    "floats": 2e-2,
}


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[: G * D]).reshape(G, D), (OUTER, INNER))


def between(local=INNER):
    return optimizers.exchange(axis_name=OUTER, local_axis_name=local)


def params():
    return random_tree(SHAPES, 0)


@functools.cache
def slamb(name="plain", local=INNER):
    axes = {"axis_name": OUTER, "local_axis_name": local}
    return optimizers.slamb(b3=0.9, **axes, **SETTINGS[name])


def loss(p, batch):
    return jnp.mean((batch @ p["w"] + p["b"][None]) ** 2)


def batches(steps=4):
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(steps, 8 * G * D, 24)), jnp.float32)


def on_groups(state):
    return slamb_jax.replicate(state, mesh(), between())


def fresh(tx):
    return on_groups((params(), tx.init(params())))


def per_group(tx, check_vma=True, step=None):
    step = train_step(tx, loss) if step is None else step
    return slamb_jax.per_worker_step(step, mesh(), between(), check_vma=check_vma)


@functools.cache
def trained(name, check_vma=True):
    state, run = fresh(slamb(name)), per_group(slamb(name), check_vma)
    for batch in batches():
        state, _ = run(state, batch)
    return state


@pytest.mark.parametrize(
    ("name", "check_vma"), [*((name, True) for name in SETTINGS), ("codes", False)]
)
def test_a_group_has_one_state(name, check_vma):
    state = trained(name, check_vma)
    there = NamedSharding(mesh(), P(OUTER))
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_equivalent_to(there, leaf.ndim)
        shards = {
            s.device: np.asarray(s.data).tobytes() for s in leaf.addressable_shards
        }
        for devices in mesh().devices:
            assert len({shards[d] for d in devices}) == 1
    w = np.asarray(state[0]["w"])
    assert (w[0] != w[1]).any()  # groups drift apart between averages


@pytest.mark.parametrize(("name", "tolerance"), [("plain", 5e-6), ("16 bits", 2e-2)])
def test_a_group_is_a_worker(name, tolerance):
    """The mean of the devices' gradients is the gradient of their joined batch."""
    tx = slamb(name, None)
    state = slamb_jax.simulated_replicas((params(), tx.init(params())), G)
    run = slamb_jax.simulated_step(train_step(tx, loss), G, between(None))
    for batch in batches():
        state, _ = run(state, batch)
    assert_near(trained(name), state, tolerance)


@pytest.mark.parametrize(
    ("name", "mapping"), [*((name, "vmap") for name in SETTINGS), ("plain", "pmap")]
)
def test_nested_mappings(name, mapping):
    tx = slamb(name)
    inner = jax.vmap(train_step(tx, loss), axis_name=INNER)
    if mapping == "vmap":
        run = jax.jit(jax.vmap(inner, axis_name=OUTER))
    else:
        run = jax.pmap(inner, axis_name=OUTER, devices=jax.devices()[:G])
    state = stack(stack((params(), tx.init(params())), D), G)
    for batch in batches():
        state, _ = run(state, batch.reshape(G, D, -1, 24))
    for leaf in jax.tree.leaves(state):
        assert (np.asarray(leaf[:, :1]) == np.asarray(leaf)).all()
    assert_near(jax.tree.map(lambda x: x[:, 0], state), trained(name), ROUNDING[name])


def test_keys_and_reports_are_of_each_device():
    def step(state, batch, key):
        return state, (batch.sum(), jax.random.uniform(key))

    run = per_group(None, step=step)
    _, reports = run(on_groups(jnp.zeros(())), batches()[0], jax.random.key(0))
    assert [len(set(x.tolist())) for x in reports] == [G * D] * 2


@pytest.mark.parametrize("name", SETTINGS)
def test_types_that_do_not_vary_stay_so(name):
    """A result whose type varied over the devices would not fit ``out_specs``."""
    tx = slamb(name)

    def by_hand(state, batch):
        p, opt_state = jax.tree.map(lambda x: x[0], state)
        zero = 0 * jax.lax.axis_index(INNER).astype(jnp.float32)
        grads = jax.grad(loss)(jax.tree.map(lambda x: x + zero, p), batch)
        updates, opt_state = tx.update(grads, opt_state, p)
        p = optax.apply_updates(p, updates)
        return jax.tree.map(lambda x: x[None], (p, opt_state))

    specs = P(OUTER), P((OUTER, INNER))
    run = jax.shard_map(by_hand, mesh=mesh(), in_specs=specs, out_specs=P(OUTER))
    shapes = jax.eval_shape(run, fresh(tx), batches()[0])
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, fresh(tx))


def test_a_leaf_without_elements_is_no_gradient_that_was_summed():
    """Its type does not vary, whatever is done with it."""
    tx, start = slamb(), params() | {"empty": jnp.ones((0, 3))}
    step = train_step(tx, lambda p, batch: loss(p, batch) + jnp.sum(p["empty"]))
    run = slamb_jax.per_worker_step(step, mesh(), between())
    run.lower(on_groups((start, tx.init(start))), batches()[0])


@ALONE
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_state_that_differs_within_a_group_is_refused(check_vma):
    batch, state = batches()[0], {"empty": jnp.zeros((0, 3)), "mean": jnp.zeros(24)}

    def own(state, batch):
        return state | {"mean": batch.mean(0)}, None

    def averaged(state, batch):
        return own(state, slamb_jax.average_parameters(batch, INNER))

    run = per_group(None, check_vma, own)
    for _ in range(2):  # the second call is refused too
        with pytest.raises(ValueError, match=r"state\['mean'\] .*'device'.*Average it"):
            run(on_groups(state), batch)
    got, _ = per_group(None, check_vma, averaged)(on_groups(state), batch)
    shards = [np.asarray(s.data).tobytes() for s in got["mean"].addressable_shards]
    assert len(set(shards)) == G


def through_reference(state, batch):
    ref = jax.new_ref(state)
    ref[...] += batch.mean()
    return ref[...], None


def through_loop(state, batch):
    return jax.lax.while_loop(lambda s: s < batch.mean(), lambda s: s + 1, state), None


def through_scatter(state, batch):
    return state + jax.lax.psum_scatter(batch[:D, 0], INNER), None


def through_callback(state, batch):
    return state + jax.pure_callback(lambda b: b.mean(), state, batch), None


@ALONE
@pytest.mark.parametrize(
    "step", [through_reference, through_loop, through_scatter, through_callback]
)
def test_however_the_state_came_to_differ(step):
    if step is through_reference and not hasattr(jax, "new_ref"):
        pytest.skip("needs jax.new_ref")
    batch = jnp.arange(2.0 * G * D).reshape(-1, 1)
    with pytest.raises(ValueError, match="state that step returned differs"):
        per_group(None, False, step)(on_groups(jnp.zeros(())), batch)


@ALONE
def test_a_barrier_beside_the_batch_is_not_refused():
    def step(state, batch):
        return jax.lax.optimization_barrier((state, batch))[0], None

    state, _ = per_group(None, False, step)(on_groups(jnp.ones(())), batches()[0])
    assert state.tolist() == [1] * G


def test_skips_are_agreed_on_by_all_devices():
    only_groups = slamb_jax.skip_not_finite(slamb(), between(None))
    with pytest.raises(ValueError, match=r"axis 'device', over which skip_not_finite"):
        jax.eval_shape(per_group(only_groups), fresh(only_groups), batches()[0])
    tx = slamb_jax.skip_not_finite(slamb(), between())
    run, state = per_group(tx), fresh(tx)
    bad = batches()[1].at[13, 0].set(jnp.nan)
    for batch in (batches()[0], bad, *batches()[1:]):
        state, _ = run(state, batch)
        if batch is bad:
            with pytest.raises(FloatingPointError, match="1 steps in a row"):
                slamb_jax.check_finite(state, 0)
    slamb_jax.check_finite(state, 0)
    assert state[1].total_notfinite.tolist() == [1] * G
    assert_near(state[0], trained("plain")[0], 1e-6)


def test_accumulated_gradients_are_averaged_first():
    tx = slamb_jax.accumulate(slamb(), 2)
    with pytest.raises(ValueError, match=r"mean.* differs .*before slamb_jax.accum"):
        per_group(tx)(fresh(tx), batches()[0])
    tx = optax.chain(
        slamb_jax.average_gradients(between()),
        slamb_jax.accumulate(slamb(local=None), 2),
    )
    run, state = per_group(tx), fresh(tx)
    for batch in batches(2):
        state, _ = run(state, batch)
    assert jnp.isfinite(state[0]["w"]).all()
