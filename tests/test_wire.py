"""The wire report: known traffic first, then what SLAMB's own programs send."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import slamb_jax
from slamb_jax._collectives import pmean
from slamb_jax.selections import Strided
from slamb_jax.wire import Groups, parse_hlo
from tests.compiled import compile_optimized, report_of
from tests.optimizers import random_tree
from tests.workers import AXIS, P, mesh_of

N = 8


def compiled(fun, x):
    run = jax.shard_map(
        fun, mesh=mesh_of(N), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    return compile_optimized(jax.jit(run).lower(x))


def floats(count):
    return jax.ShapeDtypeStruct((count,), jnp.float32)


KNOWN = {  # each worker holds 3200 bytes, 800 floats
    "all-reduce": (lambda x: jax.lax.psum(x, AXIS), 2 * 7 / 8),
    "all-gather": (lambda x: jax.lax.all_gather(x, AXIS), 7),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True), 7 / 8),
    "all-to-all": (lambda x: jax.lax.all_to_all(x.reshape(8, -1), AXIS, 0, 0), 7 / 8),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, AXIS, [(i, (i + 1) % 8) for i in range(8)]), 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
def test_known_traffic(kind):
    fun, share = KNOWN[kind]
    report = slamb_jax.wire_report(compiled(fun, floats(8 * 800)))
    (found,) = report.collectives
    assert (found.kind, found.dtype, found.elements) == (kind, "f32", 800)
    assert (found.payload_bytes, found.conditional) == (3200, False)
    assert found.wire_bytes == pytest.approx(share * 3200)
    assert kind in str(report)


def test_groups_dtypes_and_variadic_forms():
    def fun(x):
        halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
        small = jax.lax.psum(x, AXIS, axis_index_groups=halves)
        a, b = jax.lax.psum((x * 2, x[:10] + 1), AXIS)
        return small + a, b, jax.lax.psum(x.astype(jnp.int32), AXIS)

    report = slamb_jax.wire_report(compiled(fun, floats(8 * 800)))
    elements = collections.Counter()
    for c in report.collectives:  # joined or not, as this XLA likes it
        elements[c.group_size, c.dtype] += c.elements
    assert elements == {(4, "f32"): 800, (8, "f32"): 810, (8, "s32"): 800}


def test_groups_in_every_notation():
    rows = frozenset(map(frozenset, ((0, 1), (2, 3), (4, 5))))
    columns = frozenset(map(frozenset, ((0, 2, 4), (1, 3, 5))))
    for text, want in {
        "replica_groups={{0,1},{2,3},{4,5}}": Groups(2, rows),
        "replica_groups=[3,2]<=[6]": Groups(2, rows),
        "replica_groups=[2,3]<=[3,2]T(1,0)": Groups(3, columns),
        "replica_groups=mesh['node'=3,'device'=2] {'device'}": Groups(2, rows),
        "replica_groups=mesh['node'=3,'device'=2] {'node'}": Groups(3, columns),
        "source_target_pairs={{0,1},{2,3},{4,5}}": Groups(2, rows),
        "replica_groups={}": Groups(None),
    }.items():
        assert Groups.parse(f"channel_id=1, {text}, dimensions={{0}}") == want
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("node", "device"))
    assert Groups.along(mesh, "device") == Groups(2, rows)
    assert Groups.along(mesh, "node") == Groups(3, columns)
    assert Groups.along(mesh, ("node", "device")).members == {frozenset(range(6))}


def test_loops_are_multiplied_and_branches_marked():
    """A branch in a loop is counted as the most that it may run."""

    def mean(x):
        return jax.lax.pmean(x, AXIS)

    def fun(x):
        x = jax.lax.fori_loop(0, 5, lambda i, x: mean(x) + 1, x)
        x = jax.lax.cond(x[0] > 3, mean, abs, x)
        return jax.lax.fori_loop(
            0, 6, lambda i, x: jax.lax.cond(i % 3 == 0, mean, abs, x), x
        )

    report = slamb_jax.wire_report(compiled(fun, floats(8 * 100)))
    found = sorted((c.conditional, c.times) for c in report.collectives)
    assert found == [(False, 5), (True, 1), (True, 6)]
    assert report.bytes_sent() == pytest.approx(5 * 2 * 7 / 8 * 400)
    assert report.bytes_sent(conditional=True) == pytest.approx(7 * 2 * 7 / 8 * 400)
    assert "in a branch, at most 6 times" in str(report)


def test_what_cannot_be_counted_is_listed_and_not_added_up():
    def fun(x):
        return jax.lax.while_loop(
            lambda x: x[0] < 100, lambda x: jax.lax.psum(x, AXIS), x
        )

    report = slamb_jax.wire_report(compiled(fun, floats(8 * 100)))
    (found,) = report.collectives
    assert found.times is None
    assert found.wire_bytes is None
    assert "not counted" in str(report)
    with pytest.raises(ValueError, match="cannot be counted"):
        report.bytes_sent()
    unknown = dataclasses.replace(found, groups=Groups(None))
    with pytest.raises(ValueError, match="cannot be counted"):
        slamb_jax.wire.WireReport((unknown,)).bytes_over(mesh_of(8), AXIS)


def test_asynchronous_forms_are_counted_once():
    text = """HloModule m

%async_wrapped (p: f32[800]) -> f32[100] {
  %p = f32[800]{0} parameter(0)
  ROOT %rs = f32[100]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[800]) -> f32[800] {
  %x = f32[800]{0:T(1024)} parameter(0)
  %ar = f32[800]{0} all-reduce-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %done = f32[800]{0} all-reduce-done(%ar)
  %ag = (f32[800]{0}, f32[6400]{0}) all-gather-start(%done), replica_groups=[1,8]<=[8], dimensions={0}
  %agd = f32[6400]{0} all-gather-done(%ag), control-predecessors={%done}
  %rs-start = ((f32[800]{0}), f32[100]{0}) async-start(%done), calls=%async_wrapped
  %rs-done = f32[100]{0} async-done(%rs-start), calls=%async_wrapped
  ROOT %cp = f32[800]{0} copy(%done)
}
"""  # noqa: E501
    found = slamb_jax.wire_report(text).collectives
    assert [c.kind for c in found] == ["all-reduce", "all-gather", "reduce-scatter"]
    assert [c.wire_bytes for c in found] == [2 * 3 / 4 * 3200, 7 * 3200, 7 / 8 * 3200]
    module = parse_hlo(text)
    main = module.computations[module.entry]
    opcodes = {name: [y.opcode for y in module.within(x)] for name, x in main.items()}
    assert opcodes["rs-done"] == ["async-done"]
    assert opcodes["rs-start"] == ["async-start", "parameter", "reduce-scatter"]


def test_what_a_tpu_makes_of_collectives():
    """A fused reduce-scatter, slices joined by their hosts, tilings in the shapes."""

    def send(target, transfer):
        return (
            "send(%p, %token), channel_id=8, is_host_transfer=true, "
            'frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
            f'_xla_host_transfer_rendezvous="r",_xla_megascale_target={target},'
            f'_xla_megascale_transfer_type="{transfer}"}}'
        )

    among = '"{1,2,3,4}x{0:3}"'
    all_to_all = "{{100000,100001,200000,200001}}"
    text = f"""HloModule m

%all-reduce-scatter.1 (input: f32[32,128]) -> f32[8,128] {{
  %input = f32[32,128]{{1,0:T(8,128)S(1)}} parameter(0)
  %all-reduce.6 = f32[32,128]{{1,0:T(8,128)}} all-reduce(%input), channel_id=2, replica_groups={{{{0,1,2,3}}}}, use_global_device_ids=true, to_apply=%add
  ROOT %mine = f32[8,128]{{1,0:T(8,128)S(1)}} dynamic-slice(%all-reduce.6, %id, %id), dynamic_slice_sizes={{8,128}}
}}

ENTRY %main (x: f32[32,128]) -> f32[8,128] {{
  %x = f32[32,128]{{1,0:T(8,128)}} parameter(0)
  %token = token[] after-all()
  %p = f32[8,128]{{1,0:T(8,128)}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %send = (f32[8,128]{{1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) {send(among, "ALL_REDUCE")}
  %send.1 = (f32[8,128]{{1,0:T(8,128)}}, u32[]{{:S(2)}}, token[]) {send(all_to_all, "ALL_TO_ALL")}
  %send-done = token[] send-done(%send), channel_id=8, is_host_transfer=true
  ROOT %ar = f32[8,128]{{1,0:T(8,128)}} all-reduce(%p), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
}}
"""  # noqa: E501
    report = slamb_jax.wire_report(text)
    found = [(c.kind, c.dtype, c.elements, c.group_size) for c in report.collectives]
    assert found == [
        ("reduce-scatter", "f32", 4096, 4),
        ("all-reduce", "f32", 1024, 4),
        ("all-to-all", "f32", 1024, 2),
        ("all-reduce", "f32", 1024, 4),
    ]
    between = [c.between_slices for c in report.collectives]
    assert between == [False, True, True, False]
    assert report.bytes_sent() == 3 * 4096 + 2 * 3 * 1024 + 2 * 1024 + 2 * 3 * 1024
    assert "4 slices" in str(report)


COUNTED = """HloModule m

%more (p: (s32[], f32[1])) -> pred[] {
  %last = s32[]{:T(128)} constant(LAST)
  %p = (s32[]{:T(128)}, f32[1]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %last), direction=LT
}

%turn (q: (s32[], f32[1])) -> (s32[], f32[1]) {
  %q = (s32[]{:T(128)}, f32[1]{0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %x = f32[1]{0} get-tuple-element(%q), index=1
  %one = s32[]{:T(128)} constant(STEP)
  %next = s32[]{:T(128)} add(%j, %one)
  %ar = f32[1]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[1]{0}) tuple(%next, %ar)
}

ENTRY %main (y: f32[1], n: s32[]) -> (s32[], f32[1]) {
  %y = f32[1]{0} parameter(0)
  %n = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %begun = s32[]{:T(128)} copy(%zero)
  %start = (s32[]{:T(128)}, f32[1]{0}) tuple(%BEGIN, %y)
  ROOT %w = (s32[]{:T(128)}, f32[1]{0}) while(%start), condition=%more, body=%turn
}
"""


@pytest.mark.parametrize(
    ("last", "step", "begin", "times"),
    [(5, 1, "begun", 5), (5, 2, "begun", 3), (0, 1, "zero", 0), (5, 1, "n", None)],
)
def test_loops_whose_turns_no_compiler_says(last, step, begin, times):
    """As a TPU's does not: they are seen from how the loop counts."""
    text = COUNTED.replace("LAST", str(last)).replace("STEP", str(step))
    (found,) = slamb_jax.wire_report(text.replace("BEGIN", begin)).collectives
    assert found.times == times


SHAPES = {"a": (100, 120), "odd": (101, 103), "bias": (512,), "little": (10, 20)}
D, TENTH = sum(map(math.prod, SHAPES.values())), Strided(0.1, 9000)


@functools.cache
def slamb_report(selection, sync_every):
    exchange = slamb_jax.Exchange(
        AXIS, selection=selection, payload=None, sync_every=sync_every
    )
    return report_of(slamb_jax.slamb(0.01, exchange), random_tree(SHAPES, 0), N)


def elements(report, *, conditional=False):
    return sum(c.elements for c in report.collectives if c.conditional == conditional)


def test_the_average_is_in_a_conditional_and_counts_once_in_h_calls():
    never, always, sometimes = (slamb_report(TENTH, every) for every in (None, 1, 50))
    average = [c for c in sometimes.collectives if c.conditional]
    assert {(c.kind, c.dtype) for c in average} == {("all-reduce", "f32")}
    assert elements(sometimes, conditional=True) == D
    assert elements(sometimes) == elements(never)
    assert not any(c.conditional for c in never.collectives + always.collectives)
    assert elements(always) == D + elements(never)
    dense = slamb_report(None, 1)  # the momentum, in float32
    assert elements(dense) == D
    assert dense.share(dense) == 1
    want = never.bytes_sent() / dense.bytes_sent() + 1 / 50
    assert sometimes.share(dense, every=50) == pytest.approx(want)


def test_small_arrays_are_sent_as_one_and_large_ones_alone():
    tree = {f"small{i}": floats(8 * 10 * i) for i in range(1, 9)}
    tree["large"] = floats(8 * 2**20)

    def fun(tree):
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(pmean(leaves, AXIS))

    program = compiled(fun, tree)
    computations, _ = parse_hlo(program.as_text())
    found = [x for body in computations.values() for x in body.values()]
    reductions = [x for x in found if x.opcode == "all-reduce"]
    # Where XLA has no other way each operand is a round of its own.
    assert sum(len(x.operands) for x in reductions) == 2
    assert elements(slamb_jax.wire_report(program)) == 360 + 2**20
