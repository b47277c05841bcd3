"""What the compiled programs send: hand-made ones with known traffic, then SLAMB."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import slamb_jax
from slamb_jax.exchange.collectives import mean_over
from slamb_jax.wire.groups import groups_along, parse_groups
from slamb_jax.wire.hlo import parse_hlo
from tests.workers import AXIS, P, mesh_of, random_tree, stack, stepper

N = 8


def compiled(fun, x):
    run = jax.shard_map(
        fun, mesh=mesh_of(N), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    return jax.jit(run).lower(x).compile()


KNOWN = {  # each worker holds 800 floats, 3200 bytes
    "all-reduce": (lambda x: jax.lax.psum(x, AXIS), 800, 2 * 7 / 8 * 3200),
    "all-gather": (lambda x: jax.lax.all_gather(x, AXIS), 800, 7 * 3200),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True), 800, 7 / 8 * 3200
    ),
    "all-to-all": (
        lambda x: jax.lax.all_to_all(x.reshape(8, -1), AXIS, 0, 0), 800, 7 / 8 * 3200
    ),
    "collective-permute": (
        lambda x: jax.lax.ppermute(x, AXIS, [(i, (i + 1) % 8) for i in range(8)]),
        800, 3200,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KNOWN)
def test_known_traffic(kind):
    fun, elements, sent = KNOWN[kind]
    report = slamb_jax.wire_report(compiled(fun, jnp.ones(8 * 800)))
    (found,) = report.collectives
    assert (found.kind, found.dtype, found.elements) == (kind, "f32", elements)
    assert found.payload_bytes == 4 * elements
    assert found.wire_bytes == pytest.approx(sent)
    assert not found.conditional
    assert kind in str(report)


def test_groups_dtypes_and_variadic_forms():
    def fun(x):
        mesh_half = [[0, 1, 2, 3], [4, 5, 6, 7]]
        small = jax.lax.psum(x, AXIS, axis_index_groups=mesh_half)
        a, b = jax.lax.psum((x * 2, x[:10] + 1), AXIS)
        return small + a, b, jax.lax.psum(x.astype(jnp.int32), AXIS)

    report = slamb_jax.wire_report(compiled(fun, jnp.ones(8 * 800)))
    groups = collections.Counter()
    for c in report.collectives:  # joined or not, as this XLA likes it
        groups[c.group_size, c.dtype] += c.elements
    assert groups == {(4, "f32"): 800, (8, "f32"): 810, (8, "s32"): 800}


def test_groups_in_every_notation():
    rows = frozenset(map(frozenset, ((0, 1), (2, 3), (4, 5))))
    columns = frozenset(map(frozenset, ((0, 2, 4), (1, 3, 5))))
    assert parse_groups("{{0,1},{2,3},{4,5}}") == rows
    assert parse_groups("[3,2]<=[6]") == rows
    assert parse_groups("[2,3]<=[3,2]T(1,0)") == columns
    assert parse_groups("mesh['node'=3,'device'=2] {'device'}") == rows
    assert parse_groups("mesh['node'=3,'device'=2] {'node'}") == columns
    assert parse_groups("") is None
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("node", "device"))
    assert groups_along(mesh, "device") == rows
    assert groups_along(mesh, "node") == columns
    assert groups_along(mesh, ("node", "device")) == {frozenset(range(6))}


def test_loops_are_multiplied_and_branches_marked():
    def fun(x):
        x = jax.lax.fori_loop(0, 5, lambda i, x: jax.lax.pmean(x, AXIS) + 1, x)
        return jax.lax.cond(x[0] > 3, lambda x: jax.lax.pmean(x, AXIS), lambda x: x, x)

    report = slamb_jax.wire_report(compiled(fun, jnp.ones(8 * 100)))
    loop, branch = sorted(report.collectives, key=lambda c: c.conditional)
    assert (loop.times, loop.conditional) == (5, False)
    assert (branch.times, branch.conditional) == (1, True)
    assert report.bytes_sent() == pytest.approx(5 * 2 * 7 / 8 * 400)
    assert report.bytes_sent(conditional=True) == pytest.approx(2 * 7 / 8 * 400)


def test_what_cannot_be_counted_is_listed_and_not_added_up():
    def fun(x):
        return jax.lax.while_loop(
            lambda x: x[0] < 100, lambda x: jax.lax.psum(x, AXIS), x
        )

    report = slamb_jax.wire_report(compiled(fun, jnp.ones(8 * 100)))
    (found,) = report.collectives
    assert found.times is None
    assert found.wire_bytes is None
    assert "not counted" in str(report)
    with pytest.raises(ValueError, match="cannot be counted"):
        report.bytes_sent()
    unnamed = dataclasses.replace(found, groups="{}", group_size=None)  # all devices
    with pytest.raises(ValueError, match="cannot be counted"):
        slamb_jax.WireReport((unnamed,)).bytes_over(mesh_of(8), AXIS)


def test_asynchronous_forms_are_counted_once():
    text = """HloModule m, entry_computation_layout={()->f32[800]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%async_wrapped (p: f32[800]) -> f32[100] {
  %p = f32[800]{0} parameter(0)
  ROOT %rs = f32[100]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[800]) -> f32[800] {
  %x = f32[800]{0:T(1024)} parameter(0)
  %ar = f32[800]{0} all-reduce-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %done = f32[800]{0} all-reduce-done(%ar)
  %ag = (f32[800]{0}, f32[6400]{0}) all-gather-start(%done), replica_groups=[1,8]<=[8], dimensions={0}
  %agd = f32[6400]{0} all-gather-done(%ag)
  %rs-start = ((f32[800]{0}), f32[100]{0}) async-start(%done), calls=%async_wrapped
  %rs-done = f32[100]{0} async-done(%rs-start), calls=%async_wrapped
  ROOT %cp = f32[800]{0} copy(%done)
}
"""  # noqa: E501
    found = slamb_jax.wire_report(text).collectives
    assert [c.kind for c in found] == ["all-reduce", "all-gather", "reduce-scatter"]
    assert [c.wire_bytes for c in found] == [2 * 3 / 4 * 3200, 7 * 3200, 7 / 8 * 3200]


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
    text = f"""HloModule m, entry_computation_layout={{()->f32[8,128]{{1,0}}}}

%all-reduce-scatter.1 (input: f32[30,128]) -> f32[8,128] {{
  %input = f32[30,128]{{1,0:T(8,128)S(1)}} parameter(0)
  %zero = f32[]{{:T(128)}} constant(0)
  %pad = f32[32,128]{{1,0:T(8,128)}} pad(%input, %zero), padding=0_2x0_0
  %all-reduce.6 = f32[32,128]{{1,0:T(8,128)}} all-reduce(%pad), channel_id=2, replica_groups={{{{0,1,2,3}}}}, use_global_device_ids=true, to_apply=%add
  %id = u32[] partition-id()
  ROOT %mine = f32[8,128]{{1,0:T(8,128)S(1)}} dynamic-slice(%all-reduce.6, %id, %id), dynamic_slice_sizes={{8,128}}
}}

ENTRY %main (x: f32[30,128]) -> f32[8,128] {{
  %x = f32[30,128]{{1,0:T(8,128)}} parameter(0)
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


def test_a_program_without_text_is_refused():
    with pytest.raises(ValueError, match="program must be compiled"):
        slamb_jax.wire_report("")


LARGE = {"a": (100, 120), "b": (96, 512), "c": (3, 3, 32, 64), "odd": (101, 103)}
SMALL = {"bias": (512,), "scale": (), "little": (10, 20)}


@functools.cache
def slamb_report(**settings):
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, **settings)
    params = random_tree(LARGE | SMALL, 0)
    state = stack(tx.init(params), N)
    step = stepper(tx, "shard_map", N)
    stacked = stack(params, N)
    return slamb_jax.wire_report(step.lower(stacked, state, stacked))


def sizes(shapes):
    return {name: jnp.zeros(s).size for name, s in shapes.items()}


@pytest.mark.parametrize("selection", ["strided", "permutation", "bernoulli"])
@pytest.mark.parametrize("compress_ratio", [0.1, 0.25])
def test_a_step_sends_its_share_and_no_more(selection, compress_ratio):
    report = slamb_report(selection=selection, compress_ratio=compress_ratio)
    every = [c for c in report.collectives if not c.conditional]
    assert {c.dtype for c in every} == {"f32"}
    large, small = sum(sizes(LARGE).values()), sum(sizes(SMALL).values())
    bound = 1.02 * (large * compress_ratio + small)
    if selection == "bernoulli":
        bern = slamb_jax.Bernoulli(compress_ratio)
        bound = small + sum(
            bern.capacity(slamb_jax.Leaf(0, 0, s, 0)) for s in LARGE.values()
        )
    assert large * compress_ratio <= sum(c.elements for c in every) <= bound


def test_the_average_stands_in_a_conditional():
    report = slamb_report()
    average = [c for c in report.collectives if c.conditional]
    d = sum(sizes(LARGE | SMALL).values())
    assert {(c.kind, c.dtype) for c in average} == {("all-reduce", "f32")}
    assert sum(c.elements for c in average) == d
    never = slamb_report(sync_every=None)
    assert not [c for c in never.collectives if c.conditional]
    always = slamb_report(sync_every=1)
    assert not [c for c in always.collectives if c.conditional]
    total = sum(c.elements for c in always.collectives)
    assert total == d + sum(c.elements for c in never.collectives)


@pytest.mark.parametrize("mu_dtype", ["bfloat16", "float16"])
def test_sixteen_bits_travel_as_sixteen(mu_dtype):
    """Neither the promotion of CPU all-reduces nor a moved cast widens the payload."""
    wide, narrow = slamb_report(), slamb_report(mu_dtype=mu_dtype)
    every = [c for c in narrow.collectives if not c.conditional]
    assert {c.dtype for c in every} == {"u16"}
    assert narrow.bytes_sent() == pytest.approx(wide.bytes_sent() / 2, rel=0.01)


def test_small_arrays_travel_as_one_and_large_ones_alone():
    tree = {f"small{i}": jnp.ones(8 * 10 * i) for i in range(1, 9)}
    tree["large"] = jnp.ones(8 * 2**20)

    def fun(tree):
        leaves, treedef = jax.tree.flatten(tree)
        return treedef.unflatten(mean_over(leaves, AXIS))

    program = compiled(fun, tree)
    computations, _ = parse_hlo(program.as_text())
    found = [x for body in computations.values() for x in body.values()]
    reductions = [x for x in found if x.opcode == "all-reduce"]
    # Where XLA has no other way each operand is a round of its own.
    assert sum(len(x.operands) for x in reductions) == 2
    report = slamb_jax.wire_report(program)
    assert sum(c.elements for c in report.collectives) == 360 + 2**20
