"""Parameters sharded over a second mesh axis: traffic, copies, and what is refused.

That their numbers are those of unsharded ones is in the campaign; Muon's, which
gathers its matrices, are here.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from slamb_jax.exchange.selections import Leaf, Strided, elements_sent
from slamb_jax.links.directions import DimensionNumbers
from tests.close import assert_close, assert_same_bits
from tests.optimizers import any_lamb, random_tree, step_on_gradients
from tests.shards import ALONE, SHARDS, N, in_shard_map, mesh_4x2
from tests.workers import AXIS, P, on_mesh

SHAPES = {
    "q": (32, 4, 8), "heads": (4, 8, 32), "up": (32, 128), "bias": (128,),
    "down": (128, 32), "scale": (32,), "scale2": (32,),
}  # fmt: skip
SPECS = {  # heads and hidden units, as in Megatron
    "q": P(None, "model"), "heads": P("model"), "up": P(None, "model"),
    "bias": P("model"), "down": P("model"), "scale": None, "scale2": P(),
}  # fmt: skip
CHOICE = Strided(0.25, 500, 3)
SELECTED = {"payload": None, "selection": CHOICE, "sync_every": 4}


def exchange(specs=SPECS, **settings):
    return slamb_jax.Exchange(AXIS, param_specs=specs, **SELECTED | settings)


EXCHANGE = exchange()
SLAMB = slamb_jax.slamb(0.1, EXCHANGE, weight_decay=0.1)


def running(tx, exchange=EXCHANGE, check_vma=True, shapes=SHAPES):
    """The step of all workers on gradients, and the state that it starts from."""
    params, step = random_tree(shapes, 0), step_on_gradients(tx)
    start = params, tx.init(params)
    return on_mesh(step, start, mesh_4x2(), exchange, check_vma=check_vma)


def trained(tx, check_vma=True):
    run, state = running(tx, check_vma=check_vma)
    for t in range(5):
        state, _ = run(state, random_tree(SHAPES, 1 + t, N))
    return state


def collectives(run, state, shapes):
    """Of the compiled step: those over the shards of a worker, and among workers."""
    lowered = run.lower(state, random_tree(shapes, 1, N))
    report = slamb_jax.wire_report(lowered)
    assert {c.group_size for c in report.collectives} <= {SHARDS, N}
    return ([c for c in report.collectives if c.group_size == n] for n in (SHARDS, N))


SLOW = functools.partial(pytest.param, marks=pytest.mark.long)
each_check_vma = pytest.mark.parametrize("check_vma", [True, SLOW(False)])


@each_check_vma
@pytest.mark.parametrize("settings", [{}, {"payload": "ternary", "selection": None}])
def test_nothing_is_gathered(check_vma, settings):
    """Over the shards norms are summed, once; workers exchange their shards."""
    every = 4 if not settings else 1
    between = exchange(**settings, sync_every=every)
    run, state = running(any_lamb(0.1, between), between, check_vma)
    inner, among = collectives(run, state, SHAPES)
    assert {c.kind for c in inner} == {"all-reduce"}
    assert sum(c.elements for c in inner) <= 4 * len(SHAPES)
    packed = total = 0
    for i, (name, shape) in enumerate(sorted(SHAPES.items())):
        there = NamedSharding(mesh_4x2(), SPECS[name] or P())
        shard = there.shard_shape(shape)
        leaf = Leaf(i, shard, shards=math.prod(shape) // math.prod(shard))
        packed += elements_sent(CHOICE, leaf)
        total += leaf.size
    if settings:
        assert {c.kind for c in among} == {"all-to-all"}
        assert sum(c.wire_bytes for c in among) < 0.1 * 8 * total
        return
    assert {c.kind for c in among} == {"all-reduce"}
    assert sum(c.elements for c in among if not c.conditional) == packed
    assert sum(c.elements for c in among if c.conditional) == total  # once in H steps


def test_the_mean_of_v_is_that_of_the_whole_leaf():
    """Not of a shard, whose codes would have another unit."""
    between = exchange(payload="ternary", selection=None, sync_every=1)
    run, state = running(slamb_jax.adamw(0.1, between), between)
    state, _ = run(state, random_tree(SHAPES, 1, N))
    momentum = optax.tree.get(state, "MaskMomentumState")
    v = jax.tree.map(np.asarray, momentum.nu)
    means = jax.tree.map(lambda x: x.mean(tuple(range(1, x.ndim))), v)
    assert_close(momentum.nu_mean, means)


MATRICES = {
    "rows": (24, 16), "columns": (16, 24), "heads": (16, 4, 6), "layers": (4, 8, 12),
    "bias": (24,),
}  # fmt: skip
OF_MATRICES = {
    "rows": P("model"), "columns": P(None, "model"), "heads": P(None, "model"),
    "layers": P("model"), "bias": P("model"),
}  # fmt: skip


def numbers_of(params):
    """Of matrices as they are on one device: a shard of ``rows`` has other sizes."""
    rows = DimensionNumbers() if params["rows"].shape == (24, 16) else None
    return {"rows": rows, "columns": DimensionNumbers(), "bias": None,
            "heads": DimensionNumbers(0, (1, 2)),
            "layers": DimensionNumbers(1, 2)}  # fmt: skip


OLD = pytest.mark.skipif(
    jax.__version_info__ < (0, 10, 2), reason="lowers no index in an inner shard_map"
)


@pytest.mark.parametrize("payload", [None, SLOW("uniform8")])
@each_check_vma
@pytest.mark.parametrize("place", [pytest.param("auto", marks=OLD), "manual"])
def test_muon_orthogonalizes_whole_matrices(place, check_vma, payload):
    """And gathers those that are sharded, but no layers."""
    between = exchange(OF_MATRICES, payload=payload, selection=None, sync_every=1)
    make = functools.partial(
        slamb_jax.muon, 0.1, muon_weight_dimension_numbers=numbers_of, weight_decay=0.1
    )
    params, tx = random_tree(MATRICES, 0), make(between)
    run, state = running(tx, between, check_vma, MATRICES)
    if place == "manual":
        step = step_on_gradients(tx)
        run = in_shard_map(step, mesh_4x2(), state, OF_MATRICES, check_vma)
    inner, _ = collectives(run, state, MATRICES)
    gathered = [c.elements for c in inner if c.kind != "all-reduce"]
    assert gathered == 3 * [24 * 16 // SHARDS]
    dense = make(slamb_jax.Exchange())
    alone, want = jax.jit(step_on_gradients(dense)), (params, dense.init(params))
    for t in range(3):
        grads = random_tree(MATRICES, 1 + t, N)
        state, _ = run(state, grads)
        want, _ = alone(want, jax.tree.map(lambda g: g.mean(0, keepdims=True), grads))
        slamb_jax.assert_replicas_agree(state[0])
        got = jax.tree.map(lambda x: x[0], state[0])
        if payload is None:  # the tolerance of dense Muon in test_optimizers
            assert_close(got, want[0], units=4096)
    for name, x in want[0].items():  # halves orthogonalized apart are twice as far off
        moved = np.linalg.norm(x - params[name])
        assert np.linalg.norm(got[name] - x) < 0.25 * moved


@pytest.mark.long
def test_any_transformation_on_shards(tmp_path):
    """As the links by themselves; its state comes back to where it lay."""
    make = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
    injected = make(0.1, exchange=EXCHANGE, weight_decay=0.1)
    both = optax.chain(optax.clip(0.5), injected)
    state = trained(slamb_jax.on_shards(both, EXCHANGE))
    want = trained(optax.chain(optax.clip(0.5), SLAMB))
    assert_close(state[0], want[0], units=256)
    there = NamedSharding(mesh_4x2(), P(AXIS, None, "model"))
    assert state[0]["up"].sharding.is_equivalent_to(there, 3)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        back = checkpoints.restore(state).state
    assert_same_bits(back, state)
    for a, b in zip(*map(jax.tree.leaves, (back, state)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)


@ALONE
def test_copies_that_come_to_differ_are_refused():
    """A norm of one shard, with types not tracked, moves unsharded leaves apart."""
    clip = slamb_jax.on_shards(optax.clip_by_global_norm(1.0), EXCHANGE)
    with pytest.raises(ValueError, match=r"\['scale'\] .* differs .*'model'"):
        trained(optax.chain(clip, optax.sgd(0.1)), check_vma=False)


def test_a_state_that_is_unlike_the_parameters_is_refused():
    tx = optax.stateless(lambda g, _: g)._replace(init=lambda params: jnp.ones(3))
    with pytest.raises(ValueError, match=r"state.* must be a scalar .* shape \(3,\)"):
        trained(slamb_jax.on_shards(tx, EXCHANGE))
