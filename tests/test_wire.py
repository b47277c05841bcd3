"""The wire report: what it counts, and how it reads each compiler's text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import slamb_jax
from examples.common.traffic import report_of
from slamb_jax.exchange.collectives import pmean
from slamb_jax.wire import Collective, WireReport
from slamb_jax.wire.hlo import parse_hlo
from slamb_jax.wire.report import divide_mesh, parse_groups
from tests.compiled import hlo
from tests.optimizers import random_tree
from tests.workers import AXIS, mesh_of, over_workers

N = 8


EIGHT = frozenset({frozenset(range(N))})
ONCE = Collective("all-reduce", "f32", 800, 3200, EIGHT, conditional=False, times=1)
SHARES = {"all-reduce": 7 / 4, "all-gather": 7, "reduce-scatter": 7 / 8}
SHARES |= {"all-to-all": 7 / 8, "collective-permute": 1}


@pytest.mark.parametrize("kind", SHARES)
def test_a_ring_of_eight_sends_its_share(kind):
    """Which collectives a program has is in ``campaign/test_programs.py``."""
    once = dataclasses.replace(ONCE, kind=kind)
    rare = dataclasses.replace(once, conditional=True, times=6)
    report = WireReport((once, rare))
    assert report.bytes_sent() == once.wire_bytes == SHARES[kind] * 3200
    assert report.bytes_sent(conditional=True) == 6 * SHARES[kind] * 3200
    assert str(report).endswith("in a branch, at most 6 times")
    dense = WireReport((dataclasses.replace(once, times=4),))
    assert report.share(dense, every=3) == pytest.approx((1 + 6 / 3) / 4)
    assert dense.share(dense) == 1


ROWS = frozenset(map(frozenset, ((0, 1), (2, 3), (4, 5))))
COLUMNS = frozenset(map(frozenset, ((0, 2, 4), (1, 3, 5))))
NOTATIONS = {
    "replica_groups={{0,1},{2,3},{4,5}}": ROWS,
    "replica_groups=[3,2]<=[6]": ROWS,
    "replica_groups=[2,3]<=[3,2]T(1,0)": COLUMNS,
    "replica_groups=mesh['node'=3,'device'=2] {'device'}": ROWS,
    "replica_groups=mesh['node'=3,'device'=2] {'node'}": COLUMNS,
    "source_target_pairs={{0,1},{2,3},{4,5}}": ROWS,
    "replica_groups={}": None,
}


def test_groups_in_every_notation():
    for text, want in NOTATIONS.items():
        assert parse_groups(f"channel_id=1, {text}, dimensions={{0}}") == want
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("node", "device"))
    assert divide_mesh(mesh, "device") == ROWS
    assert divide_mesh(mesh, "node") == COLUMNS
    assert divide_mesh(mesh, ("node", "device")) == {frozenset(range(6))}


@pytest.mark.parametrize("unknown", ["times", "groups"])
def test_what_cannot_be_counted_is_listed_and_not_added_up(unknown):
    report = WireReport((dataclasses.replace(ONCE, **{unknown: None}),))
    assert "not counted" in str(report)
    for count in (report.bytes_sent, lambda: report.bytes_over(mesh_of(N), AXIS)):
        with pytest.raises(ValueError, match="cannot be counted"):
            count()


def test_asynchronous_forms_are_counted_once():
    report = slamb_jax.wire_report(hlo("asynchronous")).collectives
    assert {c.kind: c.wire_bytes for c in report} == {
        "all-reduce": 2 * 3 / 4 * 3200,
        "all-gather": 7 * 3200,
        "reduce-scatter": 7 / 8 * 3200,
    }
    assert len(report) == 3


def test_what_a_tpu_makes_of_collectives():
    """A fused reduce-scatter, slices joined by their hosts, tilings in the shapes."""
    report = slamb_jax.wire_report(hlo("tpu"))
    assert [
        (c.kind, c.dtype, c.elements, c.group_size, c.wire_bytes)
        for c in report.collectives
    ] == [
        ("reduce-scatter", "f32", 4096, 4, 3 * 4096),
        ("send", "f32", 1024, None, None),
        ("all-reduce", "f32", 1024, 4, 2 * 3 * 1024),
    ]


def test_small_arrays_are_sent_as_one_and_large_ones_alone():
    sizes = [*range(10, 90, 10), 2**20]
    own = [jax.ShapeDtypeStruct((N, n), jnp.float32) for n in sizes]
    run = over_workers(lambda xs: pmean(xs, AXIS), "shard_map_unchecked", N)
    program = run.lower(own).compile()
    computations, _ = parse_hlo(program.as_text())
    all_of_them = [x for body in computations.values() for x in body.values()]
    # Where XLA has no other way each operand is a round of its own.
    rounds = [len(x.operands) for x in all_of_them if x.opcode == "all-reduce"]
    assert sum(rounds) == 2
    collectives = slamb_jax.wire_report(program).collectives
    assert sum(c.elements for c in collectives) == 360 + 2**20


@pytest.mark.parametrize("route", ["owners", "all"])
@pytest.mark.parametrize("payload", ["ternary", "bfloat16"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_step_waits_for_one_message_or_two(n, payload, route):
    """Each collective is one message, since an all-gather is of two workers only."""
    exchange = slamb_jax.Exchange(AXIS, payload=payload, route=route)
    params = random_tree({"large": (300, 250), "w": (40, 60), "b": (60,)}, 0)
    tx = slamb_jax.skip_not_finite(slamb_jax.adamw(0.01, exchange), exchange)
    report = report_of(tx, exchange, params, mesh_of(n))
    kinds = [c.kind for c in report.collectives]
    if n == 2:
        assert kinds == ["all-gather"]
    else:
        assert kinds == ["all-to-all"] * (1 if route == "all" else 2)
