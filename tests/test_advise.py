"""The advisor: its arithmetic beside compiled programs, and its verdicts."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import slamb_jax
from slamb_jax import _collectives
from tests.workers import AXIS, P, random_tree, stack, stepper

N = 8
SHAPES = {
    "embed": (517, 48), "kernel": (96, 512), "conv": (3, 3, 32, 64), "odd": (101, 103),
    "little": (10, 20), "bias": (512,), "scale": (),
}  # fmt: skip
PAYLOADS = {
    "as it is": None,
    "bfloat16": "bfloat16",
    "uniform8": slamb_jax.StochasticUniform(),
    "uniform4": slamb_jax.StochasticUniform(4),
    "mixed": slamb_jax.StochasticUniform(4, mean_bits=8),
    "natural": slamb_jax.NaturalCompression(block_size=100),
}
UPDATES = (0.010, 0.012)
NETWORK = slamb_jax.Network(N, 1e9)


def advise(params=340e6, network=NETWORK, **settings):
    settings = {"step_seconds": 0.5, "optimizer_seconds": UPDATES} | settings
    return slamb_jax.advise(params, network, **settings)


def report_of(tx):
    params = random_tree(SHAPES, 0)
    stacked = stack(params, N)
    state = stack(tx.init(params), N)
    step = stepper(tx, "shard_map_unchecked", N)
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        return slamb_jax.wire_report(step.lower(stacked, state, stacked))


def dense_lamb(dtype):
    def mean(grads, _):
        leaves, treedef = jax.tree.flatten(grads)
        leaves = _collectives.mean_over([x.astype(dtype) for x in leaves], AXIS)
        return treedef.unflatten([x.astype(jnp.float32) for x in leaves])

    return optax.chain(optax.stateless(mean), optax.lamb(0.01))


@pytest.mark.parametrize("name", ["lamb", "lamb_bfloat16"])
def test_dense_bytes_are_those_of_the_compiled_program(name):
    report = report_of(dense_lamb("float32" if name == "lamb" else "bfloat16"))
    cost = getattr(advise(random_tree(SHAPES, 0)), name)
    assert cost.bytes_per_step == pytest.approx(report.bytes_sent(), rel=0.01)


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16"])
@pytest.mark.parametrize(("compress_ratio", "min_size"), [(0.1, 9000), (0.3, 0)])
def test_slamb_bytes_are_those_of_the_compiled_program(
    mu_dtype, compress_ratio, min_size
):
    settings = {"compress_ratio": compress_ratio, "min_size": min_size}
    settings["mu_dtype"] = mu_dtype
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, sync_every=10, **settings)
    report = report_of(tx)
    ask = functools.partial(advise, random_tree(SHAPES, 0), **settings)
    never, tenth = ask(sync_every=None).slamb, ask(sync_every=10).slamb
    assert never.bytes_per_step == pytest.approx(report.bytes_sent(), rel=0.01)
    average = 10 * (tenth.bytes_per_step - never.bytes_per_step)
    assert average == pytest.approx(report.bytes_sent(conditional=True), rel=0.01)
    # jax 0.7 does not join the leaves: only the latency differs.
    quick = dataclasses.replace(NETWORK, latency=0.0)
    ask = functools.partial(ask, network=quick)
    never, tenth = ask(sync_every=None).slamb, ask(sync_every=10).slamb
    seconds = quick.report_seconds(report)
    assert never.exchange_seconds == pytest.approx(seconds, rel=0.01)
    seconds += quick.report_seconds(report, conditional=True) / 10
    assert tenth.exchange_seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("hierarchical", [False, True])
@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_bytes_of_payloads_and_groups_are_those_of_the_compiled_program(
    payload, hierarchical
):
    settings = {"min_size": 0, "sync_every": 10, "average_payload": payload}
    settings["payload"] = payload
    per_node = 2 if hierarchical else 1
    mesh = Mesh(np.array(jax.devices()).reshape(N // per_node, per_node), (AXIS, "x"))
    local = {"local_axis_name": "x"} if hierarchical else {}
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, **local, **settings)

    def step(state, batch):
        params, state = state
        grads = jax.tree.map(lambda p: p * batch.mean(), params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = random_tree(SHAPES, 0)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
    run = slamb_jax.per_worker_step(step, mesh, AXIS, **local)
    report = slamb_jax.wire_report(run.lower(state, jnp.ones((N, 1))))
    network = dataclasses.replace(NETWORK, workers_per_node=per_node)
    ask = functools.partial(
        advise, params, network, hierarchical=hierarchical, **settings
    )
    never, tenth = ask(sync_every=None).slamb, ask().slamb
    assert never.bytes_per_step == pytest.approx(report.bytes_sent(), rel=0.01)
    average = 10 * (tenth.bytes_per_step - never.bytes_per_step)
    assert average == pytest.approx(report.bytes_sent(conditional=True), rel=0.01)
    if hierarchical:
        inner = report.bytes_over(mesh, "x")
        assert never.local_bytes_per_step == pytest.approx(inner, rel=0.01)


def test_groups_send_once_over_the_link_of_their_node():
    """As much between nodes as a ring of all workers, with fewer hops."""
    flat = slamb_jax.Network(64, 1e9, workers_per_node=8, local_link=400e9, latency=0)
    ask = functools.partial(advise, network=flat, sync_every=None)
    wide, groups = ask().slamb, ask(hierarchical=True).slamb
    assert wide.local_bytes_per_step == 0
    between = groups.bytes_per_step - groups.local_bytes_per_step
    assert between == pytest.approx(2 * 7 / 8 * 0.1 * 340e6 * 4 / 8)
    seconds = groups.exchange_seconds - 8 * groups.local_bytes_per_step / 400e9
    assert seconds == pytest.approx(wide.exchange_seconds * (7 / 8) / (63 / 64))
    # Eight bits: an all-to-all and an all-gather of bytes, no flows of one node's.
    eight = ask(hierarchical=True, payload=slamb_jax.StochasticUniform()).slamb
    assert eight.exchange_seconds < 0.4 * groups.exchange_seconds
    assert "uniform8" in str(ask(payload=slamb_jax.StochasticUniform()))


@pytest.mark.parametrize("choice", [{"selection": "top_k"}, {"overlap": True}])
def test_what_is_chosen_changes_no_bytes(choice):
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, sync_every=10, **choice)
    report = report_of(tx)
    overlap = choice.get("overlap", False)
    cost = advise(random_tree(SHAPES, 0), sync_every=10, overlap=overlap).slamb
    sent = report.bytes_sent() + report.bytes_sent(conditional=True) / 10
    assert cost.bytes_per_step == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize("step_seconds", [10.0, 1e-3])
def test_no_more_is_hidden_than_there_is_compute(step_seconds):
    ask = functools.partial(advise, step_seconds=step_seconds, sync_every=10)
    soon, late = ask().slamb, ask(overlap=True).slamb
    every_step = ask(sync_every=None).slamb.exchange_seconds
    assert soon.hidden_seconds == 0
    assert late.hidden_seconds == pytest.approx(min(step_seconds, every_step))
    gain = soon.step_seconds - late.step_seconds
    assert gain == pytest.approx(late.hidden_seconds)
    assert late.exposed_seconds > 0  # the average of parameters is not hidden
    assert late.efficiency > soon.efficiency
    assert late.bytes_per_step == soon.bytes_per_step


def test_stacks_count_by_layers_as_in_the_compiled_program():
    stacked = {name: name in ("kernel", "conv") for name in SHAPES}  # of (512,), ...
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, sync_every=None, stacked=stacked)
    params = random_tree(SHAPES, 0)
    cost = advise(params, sync_every=None, stacked=stacked).slamb
    assert cost.bytes_per_step == pytest.approx(report_of(tx).bytes_sent(), rel=0.01)
    apart = advise(params, sync_every=None).slamb
    assert cost.bytes_per_step > 1.1 * apart.bytes_per_step


def test_of_shards_those_of_one_device_count():
    """Beside test_sharded_transformer, where the traffic is asserted."""
    mesh = jax.make_mesh((4, 2), (AXIS, "model"))
    there = jax.sharding.NamedSharding(mesh, P(None, "model"))
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    whole = {"w": like((100, 100), sharding=there), "b": like((512,))}
    shard = {"w": like((100, 50)), "b": like((512,))}
    ask = functools.partial(advise, sync_every=7)
    got, small = ask(whole).slamb, ask(shard, min_size=0).slamb
    assert got.bytes_per_step == small.bytes_per_step  # 10,000 elements, not 5,000
    assert ask(whole).lamb.bytes_per_step == ask(shard).lamb.bytes_per_step


def test_a_count_sends_k_and_an_hth():
    cost = advise(1e9).slamb
    assert cost.bytes_per_step == pytest.approx(2 * 7 / 8 * 4e9 * (0.1 + 0.01))
    shapes = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    exact, counted = advise(shapes).slamb, advise(1_000_000).slamb
    assert exact.bytes_per_step == pytest.approx(counted.bytes_per_step, rel=0.01)


def test_a_slow_link_pays_and_a_fast_one_does_not():
    slow = advise()
    fast = advise(network=slamb_jax.Network(N, 400e9), step_seconds=5.0)
    assert slow.pays
    assert slow.verdict.startswith("will pay: ")
    assert not fast.pays
    assert fast.verdict.startswith("will not pay: ")
    for a in (slow, fast):
        assert a.speedup > a.speedup_bfloat16
        assert a.verdict in " ".join(str(a).split())
        for cost in (a.lamb, a.lamb_bfloat16, a.slamb):
            parts = (
                cost.compute_seconds,
                cost.exchange_seconds,
                cost.optimizer_seconds,
            )
            assert cost.step_seconds == pytest.approx(sum(parts))
            assert cost.efficiency == pytest.approx(
                (parts[0] + parts[2]) / cost.step_seconds
            )


@pytest.mark.parametrize("local_link", [math.inf, 50e9])
def test_steps_are_equal_on_the_link_that_breaks_even(local_link):
    network = slamb_jax.Network(16, 1e9, workers_per_node=4, local_link=local_link)
    updates = (0.1, 0.9)
    advice = advise(network=network, optimizer_seconds=updates)
    for kind, link in (
        ("lamb", advice.break_even_link),
        ("lamb_bfloat16", advice.break_even_link_bfloat16),
    ):
        there = dataclasses.replace(network, link=link)
        at = advise(network=there, optimizer_seconds=updates)
        dense = getattr(at, kind).step_seconds
        assert at.slamb.step_seconds == pytest.approx(dense, rel=1e-6)


def test_no_link_is_too_fast_for_an_update_that_costs_no_more():
    advice = advise(optimizer_seconds=(0.01, 0.01))
    assert advice.break_even_link == math.inf
    assert "no link is too fast" in str(advice)


def test_no_link_is_slow_enough_for_what_sends_no_less():
    advice = advise(compress_ratio=1.0, sync_every=1)
    assert advice.break_even_link == 0
    assert not advice.pays
    assert "no link is slow enough" in str(advice)


def test_sixteen_bits_do_not_pay_from_full_nodes():
    """Eight workers' all-to-all goes through one link: more than an all-reduce does."""
    ask = functools.partial(advise, sync_every=None)
    flat, full = (
        slamb_jax.Network(64, 1e9, workers_per_node=w, latency=0) for w in (1, 8)
    )
    wide, narrow = (
        [ask(network=x, mu_dtype=m).slamb.exchange_seconds for x in (flat, full)]
        for m in (None, "bfloat16")
    )
    assert wide[1] == pytest.approx(wide[0])
    # An all-gather, and an all-to-all whose flows cross.
    assert narrow[0] == pytest.approx(wide[0] / 2 * (1 + 1.6) / 2, rel=0.01)
    assert narrow[1] > 1.5 * wide[1]


BAD = [
    ({"params": 0}, "params .*0"),
    ({"params": math.nan}, "params .*nan"),
    ({"params": True}, "params .*True"),
    ({"params": {}}, "params must have elements"),
    ({"params": {"n": jnp.arange(3)}}, r"params must be real .*int32 at params\['n'\]"),
    ({"step_seconds": 0.0}, "step_seconds .*0.0"),
    ({"step_seconds": None}, "step_seconds .*None"),
    ({"sync_every": 0}, "sync_every .*0"),
    ({"compress_ratio": 0}, "compress_ratio .*0"),
    ({"mu_dtype": "int8"}, "mu_dtype .*'int8'"),
    ({"payload": "int8"}, "payload .*'int8'"),
    ({"hierarchical": True}, "hierarchical=True .*workers_per_node=1"),
    ({"overlap": 1}, "overlap .*1"),
    ({"network": 8}, "network must be a slamb_jax.Network, got 8"),
    ({"optimizer_seconds": (0.1, -1)}, r"optimizer_seconds \(slamb\) .*-1"),
    ({"optimizer_seconds": 0.1}, r"optimizer_seconds must be \(lamb, slamb\), got 0.1"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_impossible_questions(settings, message):
    with pytest.raises(ValueError, match=message):
        advise(**settings)


def test_updates_are_measured():
    """A tree as it is; a count scaled from a stand-in."""
    shapes = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    small = slamb_jax.measure_optimizers(shapes)
    assert min(small) > 0
    one, hundred = (slamb_jax.measure_optimizers(x * 2**20) for x in (1, 100))
    assert min(hundred) > 10 * max(one)
