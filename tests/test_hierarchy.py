"""Groups of devices: gradients averaged within, momentum exchanged between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

import slamb_jax
from tests.workers import P, random_tree, stack

G, D = 4, 2  # groups, devices of each
SHAPES = {"w": (24, 48), "b": (48,)}
# Sums in another order; and where that tips what is rounded, a step of its grid.
ROUNDING = {"plain": 3e-6, "16 bits": 2e-2, "codes": 5e-2, "narrow": 2e-3}
OUTER, INNER = "node", "device"
SETTINGS = {
    "plain": {},
    "16 bits": {"mu_dtype": "bfloat16", "form": "product"},
    "codes": {
        "payload": slamb_jax.StochasticUniform(8, 32),
        "average_payload": slamb_jax.StochasticUniform(4, 32),
        "compress_ratio": {0: 0.5, 2: 0.25},
    },
    "narrow": {"payload": "bfloat16", "average_payload": "float16"},
}


def mesh():
    return Mesh(np.array(jax.devices()[: G * D]).reshape(G, D), (OUTER, INNER))


def params():
    return random_tree(SHAPES, 0)


def slamb(local=INNER, **settings):
    settings = {"min_size": 20, "sync_every": 3, "b3": 0.9} | settings
    return slamb_jax.slamb(0.01, axis_name=OUTER, local_axis_name=local, **settings)


def loss(p, batch):
    return jnp.mean((batch @ p["w"] + p["b"][None]) ** 2)


def step_of(tx):
    def step(state, batch, key=None):
        p, opt_state = state
        value, grads = jax.value_and_grad(loss)(p, batch)
        updates, opt_state = tx.update(grads, opt_state, p)
        noise = 0.0 if key is None else jax.random.uniform(key)
        return (optax.apply_updates(p, updates), opt_state), (value, noise)

    return step


def batches(steps=4):
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(steps, 8 * G * D, 24)), jnp.float32)


def fresh(tx, where=None):
    return slamb_jax.replicate((params(), tx.init(params())), where or mesh(), OUTER)


def per_group(tx, check_vma=True, step=None):
    return slamb_jax.per_worker_step(
        step or step_of(tx), mesh(), OUTER, local_axis_name=INNER, check_vma=check_vma
    )


@functools.cache
def trained(name, check_vma):
    tx = slamb(**SETTINGS[name])
    state, run = fresh(tx), per_group(tx, check_vma)
    for batch in batches():
        state, _ = run(state, batch)
    return state


def close(got, want, tolerance):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [*((name, True) for name in SETTINGS), ("plain", False), ("codes", False)],
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
    tx = slamb(None, **SETTINGS[name])
    state = slamb_jax.simulated_replicas((params(), tx.init(params())), G)
    run = slamb_jax.simulated_step(step_of(tx), G, OUTER)
    for batch in batches():
        state, _ = run(state, batch)
    close(trained(name, True), state, tolerance)


@pytest.mark.parametrize(
    ("name", "mapping"), [*((name, "vmap") for name in SETTINGS), ("codes", "pmap")]
)
def test_nested_mappings(name, mapping):
    tx = slamb(**SETTINGS[name])
    inner = jax.vmap(step_of(tx), axis_name=INNER)
    if mapping == "vmap":
        run = jax.jit(jax.vmap(inner, axis_name=OUTER))
    else:
        run = jax.pmap(inner, axis_name=OUTER, devices=jax.devices()[:G])
    state = stack(stack((params(), tx.init(params())), D), G)
    for batch in batches():
        state, _ = run(state, batch.reshape(G, D, -1, 24))
    for leaf in jax.tree.leaves(state):
        assert (np.asarray(leaf[:, :1]) == np.asarray(leaf)).all()
    one = jax.tree.map(lambda x: x[:, 0], state)
    close(one, trained(name, True), ROUNDING[name])


def test_a_chain_made_by_hand():
    strided = slamb_jax.Strided(min_size=20)
    compressor = slamb_jax.randk_compress_with_error_feedback(
        strided, axis_name=OUTER, local_axis_name=INNER, keep_residual=False
    )
    tx = optax.chain(
        slamb_jax.average_gradients(INNER),
        slamb_jax.mask_momentum(compressor),
        slamb_jax.layerwise_trust_ratio(strided, 0.9, axis_name=OUTER),
        slamb_jax.elementwise_rescale(strided, 0.9, axis_name=OUTER),
        optax.scale_by_learning_rate(0.01),
        slamb_jax.average_parameters_every(3, OUTER, local_axis_name=INNER),
    )
    state, run = fresh(tx), per_group(tx)
    for batch in batches():
        state, _ = run(state, batch)
    close(state[0], trained("plain", True)[0], 2e-6)


def test_keys_and_reports_are_of_each_device():
    tx = slamb()
    _, (values, noise) = per_group(tx)(fresh(tx), batches()[0], jax.random.key(0))
    assert values.shape == noise.shape == (G * D,)
    assert len(set(noise.tolist())) == len(set(values.tolist())) == G * D


def by_hand(tx, cast, batch):
    """shard_map as a user writes it; the types prove that a group has one state."""

    def run(state, batch):
        p, opt_state = jax.tree.map(lambda x: x[0], state)
        own = p
        if cast:
            zero = 0 * jax.lax.axis_index(INNER).astype(jnp.float32)
            own = jax.tree.map(lambda x: x + zero, p)
        grads = jax.grad(loss)(own, batch)
        updates, opt_state = tx.update(grads, opt_state, p)
        p = optax.apply_updates(p, updates)
        return jax.tree.map(lambda x: x[None], (p, opt_state))

    mapped = jax.shard_map(
        run, mesh=mesh(), in_specs=(P(OUTER), P((OUTER, INNER))), out_specs=P(OUTER)
    )
    return jax.jit(mapped)(fresh(tx), batch)


@pytest.mark.parametrize("name", ["plain", "codes", "narrow"])
def test_types_that_do_not_vary_stay_so(name):
    tx = slamb(**SETTINGS[name])
    got = by_hand(tx, True, batches()[0])
    want, _ = per_group(tx)(fresh(tx), batches()[0])
    close(got, want, ROUNDING[name])


def test_gradients_that_were_summed_already_are_refused():
    with pytest.raises(ValueError, match=r"updates\['b'\] .*'device'.*sums"):
        by_hand(slamb(), False, batches()[0])


def with_statistics(tx, average):
    def step(state, batch):
        (p, stats), opt_state = state
        mean = batch.mean(0)
        if average:
            mean = slamb_jax.average_parameters(mean, INNER)
        grads = jax.grad(loss)(p, batch)
        updates, opt_state = tx.update(grads, opt_state, p)
        p = optax.apply_updates(p, updates)
        # Loops and branches are looked into.
        stats = jax.lax.scan(lambda s, _: (0.5 * s + mean, None), stats, length=2)[0]
        stats = jax.lax.cond(
            opt_state[0].count > 3, lambda s: s, lambda s: 2 * s, stats
        )
        return ((p, stats), opt_state), None

    state = slamb_jax.replicate(
        ((params(), jnp.zeros(24)), tx.init(params())), mesh(), OUTER
    )
    return state, step


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_state_that_would_differ_within_a_group_is_refused(check_vma):
    tx = slamb()
    state, step = with_statistics(tx, average=False)
    with pytest.raises(ValueError, match=r"state\[0\]\[1\] .*may differ"):
        per_group(tx, check_vma, step)(state, batches()[0])
    state, step = with_statistics(tx, average=True)
    state, _ = per_group(tx, check_vma, step)(state, batches()[0])
    shards = [np.asarray(s.data).tobytes() for s in state[0][1].addressable_shards]
    assert len(set(shards)) == G


def test_loops_that_end_by_the_device_are_refused():
    def step(state, batch):
        return jax.lax.while_loop(
            lambda s: s < batch.mean(), lambda s: s + 1, state
        ), None

    state = slamb_jax.replicate(jnp.zeros(()), mesh(), OUTER)
    with pytest.raises(ValueError, match="state that step returned may differ"):
        per_group(None, step=step)(state, jnp.ones((8, 2)))


def test_skips_must_be_agreed_on_by_all_devices():
    """One that only the groups agree on would wait for ever."""
    tx = slamb_jax.skip_not_finite(slamb(), OUTER)
    with pytest.raises(ValueError, match=r"state\[0\].* may differ .*skip_not_finite"):
        per_group(tx)(fresh(tx), batches()[0])
    tx = slamb_jax.skip_not_finite(slamb(), (OUTER, INNER))
    run, state = per_group(tx), fresh(tx)
    bad = batches()[1].at[13, 0].set(jnp.nan)
    for batch in (batches()[0], bad, *batches()[1:]):
        state, _ = run(state, batch)
    assert state[1].total_notfinite.tolist() == [1] * G
    close(state[0], trained("plain", True)[0], 1e-6)


def test_accumulated_gradients_are_averaged_first():
    tx = slamb_jax.accumulate(slamb(), 2)
    with pytest.raises(ValueError, match=r"mean.* may differ .*before slamb_jax.accum"):
        per_group(tx)(fresh(tx), batches()[0])
    tx = optax.chain(
        slamb_jax.average_gradients(INNER), slamb_jax.accumulate(slamb(None), 2)
    )
    run, state = per_group(tx), fresh(tx)
    for batch in batches():
        state, _ = run(state, batch)
    assert jnp.isfinite(state[0]["w"]).all()


def test_what_goes_over_which_links():
    tx = slamb()
    report = slamb_jax.wire_report(per_group(tx).lower(fresh(tx), batches()[0]))
    d = sum(x.size for x in jax.tree.leaves(params()))
    inner, outer = (report.bytes_over(mesh(), axis) for axis in (INNER, OUTER))
    assert inner + outer == report.bytes_sent()
    sent = 2 * (G - 1) / G * outer_elements() * 4
    assert outer == pytest.approx(sent / D, rel=0.02)  # a node's link carries it once
    gradients = 2 * (D - 1) / D * 4 * d
    shared = (D - 1) * outer_elements() / D * 4
    assert inner == pytest.approx(gradients + shared, rel=0.02)
    average = [
        report.bytes_over(mesh(), axis, conditional=True) for axis in (INNER, OUTER)
    ]
    assert average[1] == pytest.approx(2 * (G - 1) / G * 4 * d / D, rel=0.01)
    assert sum(average) == report.bytes_sent(conditional=True)
    assert report.bytes_over(mesh(), (OUTER, INNER)) == 0
    with pytest.raises(ValueError, match="mesh must have the axis 'row'"):
        report.bytes_over(mesh(), "row")


def outer_elements():
    leaf = slamb_jax.Leaf(1, 48, SHAPES["w"], 48 + 24 * 48)
    rows = slamb_jax.Strided(min_size=20).rows(jnp.int32(1), leaf)
    return 48 + rows.size * slamb_jax.Strided(min_size=20).width(leaf)
