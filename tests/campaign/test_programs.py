"""The wire report of programs that were drawn at random, and so are known."""

from collections import Counter, namedtuple
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding

import slamb_jax
from benchmarks.chips import targets
from slamb_jax.wire.report import divide_mesh
from tests.campaign.draws import drawn
from tests.compiled import compile_optimized
from tests.test_chips import needs
from tests.workers import P

AXES = ("node", "device")

# One collective of each device's ``count`` elements; the salt, else two of them may
# become one. A part of a program is one of these three, or a list of parts.
Send = namedtuple("Send", "kind axis count dtype salt")
Loop = namedtuple("Loop", "turns body")  # turns None: until a condition holds
Branch = namedtuple("Branch", "ways")
# What is expected of some collectives of a program.
Sent = namedtuple("Sent", "kind dtype axis conditional known")
XLA_KIND = {
    "psum": "all-reduce",
    "psum_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
XLA_DTYPE = {"float32": "f32", "int32": "s32", "uint8": "u8"}
BYTES = {"f32": 4, "s32": 4, "u8": 1}
TURNS = st.none() | st.integers(0, 5)
TPU_KINDS = ("psum", "all_gather", "ppermute")


def programs(kinds=tuple(XLA_KIND), dtypes=tuple(XLA_DTYPE), turns=TURNS):
    """Up to three levels of loops, counted or not, and branches."""
    kind, axis, dtype = map(st.sampled_from, (kinds, AXES, dtypes))
    count = st.integers(1, 300).map(lambda k: 8 * k)  # so that it can be scattered
    sends = st.builds(Send, kind, axis, count, dtype, st.integers(1, 2**20))

    def around(part):
        several = st.lists(part, min_size=1, max_size=3)
        ways = st.lists(several, min_size=2, max_size=3).map(tuple)
        return st.one_of(st.builds(Loop, turns, several), st.builds(Branch, ways))

    return st.lists(st.recursive(sends, around, max_leaves=6), min_size=1, max_size=4)


def totals(part, times=1, conditional=False):
    """The elements of all that is sent; where turns are not known, of one turn."""
    match part:
        case Send(kind, axis, count, dtype, _):
            what = XLA_KIND[kind], XLA_DTYPE[dtype], axis
            sent = Sent(*what, conditional, times is not None)
            return Counter({sent: count * (1 if times is None else times)})
        case Loop(turns, body):
            part = body
            if turns is None or times is None:
                times = 0 if 0 in (turns, times) else None
            else:
                times *= turns
        case Branch(ways):
            part, conditional = ways, True
    found = (totals(one, times, conditional) for one in part)
    return sum(found, Counter())  # which leaves out what is 0


def lowered(part, mesh):
    """A program of all devices of the mesh that does what ``part`` says."""
    split = P(mesh.axis_names)
    run = jax.shard_map(
        lambda x: run_part(part, x, dict(mesh.shape)),
        mesh=mesh, in_specs=split, out_specs=split, check_vma=False,
    )  # fmt: skip
    there = NamedSharding(mesh, split)
    x = jax.ShapeDtypeStruct((mesh.size,), jnp.float32, sharding=there)
    return jax.jit(run).lower(x)


def run_part(part, x, sizes):
    """Every part depends on what the one before it left in ``x``, a single number."""
    match part:
        case Loop(None, body):
            turn = partial(run_part, body, sizes=sizes)
            return lax.while_loop(lambda x: x[0] < 1e6, turn, x)
        case Loop(turns, body):
            turn = lambda x, _: (run_part(body, x, sizes), None)  # noqa: E731
            return lax.scan(turn, x, length=turns)[0]
        case Branch(ways):
            runs = [partial(run_part, way, sizes=sizes) for way in ways]
            return lax.switch(jnp.abs(x[0]).astype(jnp.int32) % len(runs), runs, x)
        case Send(kind, axis, count, dtype, salt):
            n = sizes[axis]
            own = x[0] * salt + jnp.arange(count, dtype=jnp.float32)
            own = (own * own).astype(dtype)
            around = [(i, (i + 1) % n) for i in range(n)]
            found = {
                "psum": lambda: lax.psum(own, axis),
                "psum_scatter": lambda: lax.psum_scatter(own, axis, tiled=True),
                "all_gather": lambda: lax.all_gather(own, axis),
                "all_to_all": lambda: lax.all_to_all(own.reshape(n, -1), axis, 0, 0),
                "ppermute": lambda: lax.ppermute(own, axis, around),
            }[kind]()
            # Not linear, or XLA may add before it communicates what it would add after.
            return x + jnp.sum(jnp.maximum(found.astype(jnp.float32), 1.0))
    for one in part:
        x = run_part(one, x, sizes)
    return x


def axis_of(groups, kind, mesh):
    """The axis along which all groups lie; of a permute they are pairs."""
    for name in mesh.axis_names:
        along = divide_mesh(mesh, name)
        pairs_in = all(any(pair <= group for group in along) for pair in groups or ())
        if groups == along or (kind == "collective-permute" and pairs_in):
            return name
    return None


def assert_known(part, mesh, program):
    report, want = slamb_jax.wire_report(program), totals(part)
    found = Counter()
    for c in report.collectives:
        assert c.payload_bytes == c.elements * BYTES[c.dtype]
        axis = str(axis_of(c.groups, c.kind, mesh))
        sent = Sent(c.kind, c.dtype, axis, c.conditional, c.times is not None)
        found[sent] += c.elements * (1 if c.times is None else c.times)
    assert dict(found) == dict(want), report


MEANS = [Send("psum", "node", 16 * i, "int32", i) for i in range(1, 6)]
EACH = [
    *(Send(kind, "device", 80, "float32", i) for i, kind in enumerate(XLA_KIND, 1)),
    Loop(5, [Send("all_gather", "node", 24, "uint8", 7), MEANS[0]]),
    Loop(None, [Send("psum", "node", 8, "uint8", 8)]),
    Branch(([MEANS[1]], [MEANS[2]])),
    Loop(6, [Branch(([MEANS[3]], [MEANS[4]]))]),
]


@drawn(4, 120)
@given(part=programs())
@example(part=EACH)
def test_known_traffic_on_cpu(part):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES)
    assert_known(part, mesh, compile_optimized(lowered(part, mesh)))


def assert_known_on(topology, part):
    mesh = Mesh(targets.mesh_of(topology).devices.reshape(4, 2), AXES)
    assert_known(part, mesh, lowered(part, mesh).compile())


@pytest.mark.long
@needs("jax_cuda12_plugin")
@drawn(8, 20)
@given(part=programs())
def test_known_traffic_compiled_for_gpus(part):
    assert_known_on("h100:1x1x8", part)


@pytest.mark.long
@needs("libtpu")
@drawn(8, 20)
@given(part=programs(TPU_KINDS, ("float32", "int32"), st.none()))
def test_known_traffic_compiled_for_tpus(part):
    """Small arrays are not scattered there, but reduced; bytes are reduced as words.

    XLA does not say there how often a loop runs.
    """
    assert_known_on("v5p:2x2x2", part)
