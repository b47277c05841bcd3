"""The advisor: its traffic is that of compiled programs, and its verdict holds."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

import slamb_jax
from examples.common.traffic import report_of
from slamb_jax.advisor import Advice, StepCost
from slamb_jax.advisor.advice import RECORDED
from slamb_jax.exchange.selections import Strided
from tests.workers import AXIS, P, mesh_of

N = 8
SHAPES = {"embed": (517, 48), "kernel": (900, 1280), "odd": (101, 103), "bias": (512,)}
NETWORK = slamb_jax.Network(N, 1e9)
LIKE = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
PARAMS = {name: LIKE(shape) for name, shape in SHAPES.items()}
OUTER = optax.sgd(0.7, 0.9)
GROUPS = {"local_axis_name": "x"}
TENTH = {"selection": Strided(0.1, 9000), "payload": None, "sync_every": 10}


def advise(params=340e6, network=NETWORK, exchange=None, *, budget=None, **settings):
    exchange = exchange or slamb_jax.Exchange(AXIS, **settings)
    seconds = {"step_seconds": 0.5, "update_seconds": (0.010, 0.012)}
    return slamb_jax.advise(params, network, exchange, budget=budget, **seconds)


# Each setting that changes what is sent, in groups and without.
EXCHANGES = {
    "default": {},
    "groups, default": GROUPS,
    "largest of 31": {"payload": "largest_of_31"},
    "all": {"route": "all"},
    "groups, all": {"route": "all", **GROUPS},
    "groups, 16 bits": {"payload": "bfloat16", **GROUPS},
    "float32": {"payload": None},
    "parameters": {"payload": None, "sync_every": 10},
    "groups, outer, codes": {"sync_every": 10, "outer": OUTER, **GROUPS},
    "a part": TENTH,
    "groups, a part": TENTH | GROUPS,
    "a part, stacks": TENTH | {
        "selection": Strided(0.3, 0), "stacked": {x: x == "kernel" for x in SHAPES}
    },
}  # fmt: skip
EXCHANGES = {k: slamb_jax.Exchange(AXIS, **x) for k, x in EXCHANGES.items()}
EXCHANGES["a part, 8 bits"] = slamb_jax.Exchange.paper(AXIS, payload="uniform8")


def in_sequence(network, report, *, conditional=False):
    chosen = [c for c in report.collectives if c.conditional == conditional]
    assert all((c.group_size, c.times) == (N, 1) for c in chosen)
    return sum(network.seconds(c.kind, c.payload_bytes) for c in chosen)


@pytest.mark.parametrize("name", EXCHANGES)
def test_traffic_is_that_of_the_compiled_program(name):
    exchange = EXCHANGES[name]
    optimizer = slamb_jax.slamb if exchange.selection else slamb_jax.lamb
    per_node = 1 if exchange.local_axis_name is None else 2
    mesh = Mesh(np.array(jax.devices()).reshape(N // per_node, per_node), (AXIS, "x"))

    report = report_of(optimizer(0.01, exchange), exchange, PARAMS, mesh)
    network = slamb_jax.Network(N, 1e9, workers_per_node=per_node, latency=0.0)
    every = exchange.sync_every
    rare = dataclasses.replace(exchange, sync_every=10**12 if every > 1 else 1)
    advice, without = (advise(PARAMS, network, x) for x in (exchange, rare))
    read = {"bytes_per_step": report.bytes_sent}
    if per_node > 1:
        read["local_bytes_per_step"] = functools.partial(report.bytes_over, mesh, "x")
    else:
        read["exchange_seconds"] = functools.partial(in_sequence, network, report)
    for field, count in read.items():
        whole, at_every_step = (getattr(x.exchanging, field) for x in (advice, without))
        room = {"rel": 0.01, "abs": 1e-9 * whole}
        assert at_every_step == pytest.approx(count(), **room)
        average = every * (whole - at_every_step)
        assert average == pytest.approx(count(conditional=True), **room)
    if per_node == 1:  # a worker's slice is of whole blocks
        share = advice.exchanging.bytes_per_step / advice.dense.bytes_per_step
        assert advice.share == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize("n", [2, 3])
def test_few_workers_send_what_is_advised(n):
    """Two send each other all of their codes; three have slices, as more have."""
    exchange, network = EXCHANGES["default"], slamb_jax.Network(n, 1e9)
    tx = slamb_jax.lamb(0.01, exchange)
    sent = report_of(tx, exchange, PARAMS, mesh_of(n)).bytes_sent()
    cost = advise(PARAMS, network, exchange).exchanging
    assert cost.bytes_per_step == pytest.approx(sent)


@pytest.mark.parametrize(("dtype", "times"), [("float16", 4), ("float32", 1)])
def test_only_what_no_all_reduce_sums_is_sent_to_all(dtype, times):
    params = {k: jax.ShapeDtypeStruct(x, np.dtype(dtype)) for k, x in SHAPES.items()}
    average = functools.partial(advise, params, payload=None, sync_every=10)
    owners, to_all = (average(route=route) for route in ("owners", "all"))
    assert to_all.share == times * owners.share
    sent = [x.exchanging.bytes_per_step for x in (owners, to_all)]
    assert sent[1] == pytest.approx(times * sent[0], rel=1e-4)


def test_groups_send_once_over_the_link_of_their_node():
    """As much between nodes as a ring of all workers, with fewer hops."""
    flat = slamb_jax.Network(64, 1e9, workers_per_node=8, local_link=400e9, latency=0)
    wide = advise(network=flat, payload=None).exchanging
    groups = advise(network=flat, payload=None, **GROUPS).exchanging
    seconds = groups.exchange_seconds - 8 * groups.local_bytes_per_step / 400e9
    assert seconds == pytest.approx(wide.exchange_seconds * (7 / 8) / (63 / 64))


@pytest.mark.parametrize("from_settings", [False, True])
def test_only_the_shard_of_one_device_counts(from_settings):
    """Beside test_sharded, which asserts the traffic."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), (AXIS, "model"))
    spec = P(None, "model")
    placed = NamedSharding(mesh, P() if from_settings else spec)
    dense = {"w": LIKE((100, 100), sharding=placed), "b": LIKE((512,))}
    shard = {"w": LIKE((100, 50)), "b": LIKE((512,))}
    specs = {"w": spec, "b": None} if from_settings else None
    got = advise(dense, param_specs=specs, **TENTH)
    small = advise(shard, **TENTH | {"selection": Strided(0.1, 0)})
    # 10,000 elements, not 5,000, are compared with min_size.
    assert got.exchanging.bytes_per_step == small.exchanging.bytes_per_step
    assert got.dense.bytes_per_step == small.dense.bytes_per_step


def test_a_number_of_parameters_sends_k_and_an_hth():
    cost = advise(1e9, **TENTH).exchanging
    assert cost.bytes_per_step == pytest.approx(2 * 7 / 8 * 4e9 * (0.1 + 0.1))


@pytest.mark.parametrize(
    ("narrow", "payload", "outcome"),
    [  # compute and exchange of a dense step in bfloat16, beside an update of half
        # a second and an exchanging step of one
        ((0.5449, 0.0), None, "will not pay"),
        ((0.5451, 0.0), None, "may pay"),
        ((0.4, 0.3), None, "doubtful"),  # it may hide the shorter of them
        ((0.2, 0.5451), None, "may pay"),
        ((0.5451, 0.0), "ternary", "may pay"),
        ((0.5451, 0.0), "largest_of_7", "doubtful"),  # its recorded loss is higher
    ],
)
def test_the_verdict_prints_its_threshold_and_keeps_to_it(narrow, payload, outcome):
    costs = [StepCost(0, *x, 0.5) for x in ((1.5, 0.0), narrow, (0.5, 0.0))]
    recorded = RECORDED.get(payload)
    advice = Advice(*costs, {}, "", 0.05, slamb_jax.Exchange(), recorded)
    gains = (advice.speedup, advice.speedup_bfloat16, advice.speedup_hidden)
    assert gains == pytest.approx((2, 0.5 + sum(narrow), 0.5 + max(narrow)))
    assert all(f"{gain:.2f} times" in advice.verdict for gain in gains)
    assert "To pay, all must be 1.05 or more" in advice.verdict
    assert advice.verdict.startswith(f"{outcome}: a step is ")
    assert advice.verdict in " ".join(str(advice).split())
    assert advice.faster == (min(gains) >= 1.045)
    assert advice.pays == (outcome == "may pay")


def test_a_step_is_its_compute_its_exchange_and_its_update():
    advice = advise()
    cost = advice.exchanging
    assert (cost.compute_seconds, cost.update_seconds) == (0.5, 0.012)
    dense, halves = advice.dense, advice.dense_bfloat16
    assert dense.update_seconds == halves.update_seconds == 0.010
    assert dense.bytes_per_step == 2 * halves.bytes_per_step
    assert cost.step_seconds == pytest.approx(0.512 + cost.exchange_seconds)
    # So the verdict asks for the last alone.
    assert advice.speedup > advice.speedup_bfloat16 > advice.speedup_hidden


UNKNOWN = "No loss is recorded for this exchange: train a dense"
PRINTED = [
    ({"payload": "uniform8"}, UNKNOWN),
    (TENTH, UNKNOWN),
    ({"outer": OUTER}, UNKNOWN),
    ({"outer": OUTER, "sync_every": 30}, "', sync_every=30, outer=...): 0.172% of"),
    ({}, "In ternary the loss differed from dense AdamW's after as many steps by -2.6 "
     "to +4.0 % (the intervals"),
    ({}, "models of 23,008 to 426,920 parameters, each"),
    ({"payload": "largest_of_31"}, "by +12.8 to +16.9 % (the intervals"),
    ({"payload": "largest_of_31"}, "models of 120,576 parameters, each"),
]  # fmt: skip


@pytest.mark.parametrize(("exchange", "text"), PRINTED)
def test_the_exchange_is_printed_and_its_loss_as_far_as_it_is_recorded(exchange, text):
    assert text in " ".join(str(advise(**exchange)).split())


@pytest.mark.parametrize(
    ("exchange", "messages", "said"),
    [
        ({}, 2, False),
        ({"payload": None}, 30, True),
        ({"route": "all"}, 1, False),
        ({"outer": OUTER, "sync_every": 30}, 2 / 30, False),
    ],
)
def test_latency_is_what_fewer_bytes_do_not_shorten(exchange, messages, said):
    """Of an all-to-all one message, of a ring n - 1; on an endless link that is all."""
    advice = advise(network=slamb_jax.Network(16, 1e15, latency=0.02), **exchange)
    for dense in (advice.dense, advice.dense_bfloat16):  # goes round twice
        assert dense.latency_seconds == pytest.approx(0.6)
    cost = advice.exchanging
    assert cost.latency_seconds == pytest.approx(messages * 0.02)
    assert cost.exchange_seconds == pytest.approx(cost.latency_seconds, rel=1e-3)
    assert ("fewer exchanges do" in " ".join(str(advice).split())) == said


def test_it_says_where_one_message_to_all_is_faster():
    """Of four workers it has twice the bytes, and half of the latency."""
    near, far = (slamb_jax.Network(4, 1e9, latency=late) for late in (0.0, 0.1))
    assert 'route="all"' not in str(advise(1e6, near))
    told, asked = advise(1e6, far), advise(1e6, far, route="all")
    assert 'With route="all"' in str(told)
    assert told.routes["all"] == asked.exchanging
    assert "With route" not in str(asked)
    many = slamb_jax.Network(64, 1e9, latency=0.001)
    assert 'With route="owners"' in str(advise(1e6, many, route="all"))


def test_what_is_written_as_json_is_read_again():
    settings = {"local_axis_name": ("x", "y"), "sync_every": None, "route": "all"}
    exchange = slamb_jax.Exchange.paper("host", **settings)
    text = json.dumps(exchange.to_json())
    assert slamb_jax.Exchange.from_json(json.loads(text)) == exchange


@pytest.mark.parametrize(
    ("share", "route", "payload"),
    [
        (1.0, "owners", "ternary"),
        (0.06, "owners", "ternary"),
        (0.03, "owners", "largest_of_7"),
        (0.01, "owners", "largest_of_31"),
        (0.005, "owners", "largest_of_127"),
        (0.03, "all", "largest_of_127"),  # four times as much
    ],
)
def test_a_budget_is_kept_and_used(share, route, payload):
    params = {"w": LIKE((2048, 2048))}
    asked = slamb_jax.Exchange((AXIS, "pod"), route=route)
    advice = advise(params, NETWORK, asked, budget=share)
    assert advice.exchange == dataclasses.replace(asked, payload=payload)
    assert advice == advise(params, NETWORK, advice.exchange)
    copies = N / 2 if route == "all" else 1
    assert advice.share == copies * advice.exchange.share(params) <= share


@pytest.mark.parametrize("size", [10_000, 100_000, 10_000_000])
def test_few_bits_spends_about_what_the_paper_does(size):
    params = [jax.ShapeDtypeStruct((size // 100, 100), jnp.float32)]
    share = slamb_jax.Exchange.few_bits("data").share(params)
    assert 0.1 < share < slamb_jax.Exchange.paper("data").share(params) + 0.02
