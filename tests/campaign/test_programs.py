"""The wire report of programs that were drawn at random, and so are known."""

import collections
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given
from jax.sharding import Mesh

import slamb_jax
from benchmarks.chips import targets
from slamb_jax.wire import RING_SHARES, Groups
from tests.campaign.draws import drawn
from tests.campaign.programs import (
    XLA_KIND,
    Branch,
    Loop,
    Part,
    Send,
    Sent,
    lowered,
    programs,
    totals,
)
from tests.compiled import compile_optimized
from tests.test_chips import needs

AXES = ("node", "device")


def mesh_of_both() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES)


def found_in(report: slamb_jax.wire.WireReport, mesh: Mesh) -> dict[Sent, int]:
    """The elements of each kind of collective, all turns together."""
    along = {Groups.along(mesh, a).members: a for a in mesh.axis_names}
    found: collections.Counter[Sent] = collections.Counter()
    for c in report.collectives:
        axis = along.get(c.groups.members)
        if c.kind == "collective-permute":  # whose groups are pairs
            axis = _axis_of_pairs(c.groups, mesh)
        known = c.times is not None
        sent = Sent(c.kind, c.dtype, str(axis), c.conditional, known)
        found[sent] += c.elements * (1 if c.times is None else c.times)
    return dict(found)


def _axis_of_pairs(groups: Groups, mesh: Mesh) -> str | None:
    """The axis along which all pairs of source and target lie."""
    places = np.stack(np.unravel_index(range(mesh.size), mesh.devices.shape), -1)
    for i, name in enumerate(mesh.axis_names):
        others = np.delete(places, i, axis=1)
        if all(len(np.unique(others[sorted(pair)], axis=0)) == 1
               for pair in groups.members or ()):  # fmt: skip
            return str(name)
    return None


def assert_known(part: Part, mesh: Mesh, program: Any) -> None:
    report = slamb_jax.wire_report(program)
    want = totals(part)
    assert found_in(report, mesh) == want, report
    if not all(sent.known for sent in want):
        return
    for conditional in (False, True):
        sizes = {"f32": 4, "s32": 4, "u8": 1}
        of_axis: collections.Counter[str] = collections.Counter()
        for sent, elements in want.items():
            share = RING_SHARES[sent.kind](mesh.shape[sent.axis])
            if sent.conditional == conditional:
                of_axis[sent.axis] += share * elements * sizes[sent.dtype]
        whole = report.bytes_sent(conditional=conditional)
        assert whole == pytest.approx(sum(of_axis.values()))


MEANS = [Send("psum", "node", 16 * i, "int32", i) for i in range(1, 6)]
EACH = [
    *(Send(kind, "device", 80, "float32", i) for i, kind in enumerate(XLA_KIND, 1)),
    Loop(5, [Send("all_gather", "node", 24, "uint8", 7), MEANS[0]]),
    Branch(([MEANS[1]], [MEANS[2]])),
    Loop(6, [Branch(([MEANS[3]], [MEANS[4]]))]),
]


@drawn(4, 120)
@given(part=programs(AXES))
@example(part=EACH)
def test_known_traffic_on_cpu(part: Part) -> None:
    mesh = mesh_of_both()
    assert_known(part, mesh, compile_optimized(lowered(part, mesh)))


def assert_known_on(topology: str, part: Part) -> None:
    mesh = Mesh(targets.mesh_of(topology).devices.reshape(4, 2), AXES)
    assert_known(part, mesh, lowered(part, mesh).compile())


@pytest.mark.long
@needs("jax_cuda12_plugin")
@drawn(8, 20)
@given(part=programs(AXES))
def test_known_traffic_compiled_for_gpus(part: Part) -> None:
    assert_known_on("h100:1x1x8", part)


@pytest.mark.long
@needs("libtpu")
@drawn(8, 20)
@given(part=programs(AXES, ("psum", "all_gather", "ppermute"), ("float32", "int32")))
def test_known_traffic_compiled_for_tpus(part: Part) -> None:
    """Small arrays are not scattered there, but reduced; bytes are reduced as words."""
    assert_known_on("v5p:2x2x2", part)
