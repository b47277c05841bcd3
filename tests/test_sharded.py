"""Parameters sharded over a second mesh axis: traffic, copies, and what is refused.

That their numbers are those of unsharded ones is in the campaign.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from slamb_jax.selections import Leaf, Strided, elements_sent
from tests.close import assert_close, assert_same_bits
from tests.compiled import compile_optimized
from tests.optimizers import random_tree, step_on_gradients, train_step
from tests.shards import OLD, SHARDS, N, auto, mesh_4x2
from tests.workers import AXIS, P

ALONE = pytest.mark.filterwarnings("ignore:step changes most of the state")

# A block of attention and MLP over embedded tokens, of 4 heads.
SHAPES = {
    "embed": (64, 32), "q": (32, 4, 8), "k": (32, 4, 8), "v": (32, 4, 8),
    "heads": (4, 8, 32), "up": (32, 128), "bias": (128,), "down": (128, 32),
    "scale": (32,), "scale2": (32,),
}  # fmt: skip
STYLES = {  # heads and hidden units, as in Megatron; or every matrix
    "tensor parallel": {
        "embed": P("model"), "heads": P("model"), "down": P("model"),
        "up": P(None, "model"), "bias": P("model"), "scale": None, "scale2": P(),
        **dict.fromkeys("qkv", P(None, "model")),
    },
    "fully sharded": {k: P("model") if len(s) > 1 else P() for k, s in SHAPES.items()},
}  # fmt: skip
SPECS, CHOICE = STYLES["tensor parallel"], Strided(0.25, 500, 3)
TOKENS = np.random.default_rng(0).integers(0, 64, (16, 12))


def exchange(specs=SPECS, **settings):
    settings = {"payload": None, "selection": CHOICE, "sync_every": 4} | settings
    return slamb_jax.Exchange(AXIS, param_specs=specs, **settings)


EXCHANGE = exchange()
SLAMB = slamb_jax.slamb(0.1, EXCHANGE, weight_decay=0.1)


def loss_of(p, tokens):
    x = p["embed"][tokens[:, :-1]]
    h = p["scale"] * jax.nn.standardize(x)
    q, k, v = (jnp.einsum("bti,ihd->bthd", h, p[name]) for name in "qkv")
    seen = jnp.tri(x.shape[1], dtype=bool)
    weights = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, k), -1e9)
    attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(weights), v)
    x = x + jnp.einsum("bthd,hdi->bti", attended, p["heads"])
    h = jax.nn.gelu(p["scale2"] * jax.nn.standardize(x) @ p["up"] + p["bias"])
    logits = (x + h @ p["down"]) @ p["embed"].T
    ce = optax.softmax_cross_entropy_with_integer_labels
    return ce(logits, tokens[:, 1:]).mean()


def running(tx, exchange=EXCHANGE, check_vma=True, step=None):
    """The step of all workers, and the state that it starts from."""
    params, mesh = random_tree(SHAPES, 0, scale=0.1), mesh_4x2()
    step = train_step(tx, loss_of) if step is None else step
    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    return slamb_jax.per_worker_step(step, mesh, exchange, check_vma=check_vma), state


def on_gradients(tx, steps=5, limit=np.inf, check_vma=True):
    run, state = running(tx, check_vma=check_vma, step=step_on_gradients(tx))
    for t in range(steps):
        grads = random_tree(SHAPES, 1 + t, N)
        state, _ = run(state, jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads))
    return state


def report_of(*args):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run, state = running(*args)
        return slamb_jax.wire_report(compile_optimized(run.lower(state, TOKENS)))


def moved(report):
    """What moves arrays within a worker, and does not sum: which kind, what size."""
    kinds = ("all-gather", "all-to-all", "collective-permute")
    found = (c for c in report.collectives if c.kind in kinds and c.group_size != N)
    return collections.Counter((c.kind, c.elements) for c in found)


@auto
@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("selects", [True, False])
def test_nothing_is_gathered_that_dense_lamb_does_not_gather(style, check_vma, selects):
    codes = {"payload": "ternary", "selection": None, "sync_every": 1}
    between = exchange(STYLES[style], **({} if selects else codes))
    mean = optax.stateless(lambda g, _: slamb_jax.average_parameters(g, axis_name=AXIS))
    dense = report_of(optax.chain(mean, optax.lamb(0.1)), between, check_vma)
    report = report_of(slamb_jax.slamb(0.1, between), between, check_vma)
    assert not moved(report) - moved(dense)
    # The norms are summed over the shards, in one small all-reduce more.
    ours, theirs = (
        [c.elements for c in x.collectives if c.group_size == SHARDS]
        for x in (report, dense)
    )
    assert len(ours) <= len(theirs) + 1
    assert sum(ours) <= sum(theirs) + 4 * len(SHAPES)
    # Between workers: of a selection the packed shards, and all once in sync_every.
    among = [c for c in report.collectives if c.group_size == N]
    packed = total = 0
    for i, (name, shape) in enumerate(sorted(SHAPES.items())):
        spec = STYLES[style][name] or P()
        leaf = Leaf(i, NamedSharding(mesh_4x2(), spec).shard_shape(shape))
        leaf = Leaf(i, leaf.shape, shards=int(np.prod(shape)) // leaf.size)
        packed += elements_sent(CHOICE, leaf)
        total += leaf.size
    if not selects:
        assert {c.kind for c in among} == {"all-to-all", "all-gather"}
        assert sum(c.wire_bytes for c in among) < 0.1 * 8 * total
        return
    assert {c.kind for c in among} == {"all-reduce"}
    assert sum(c.elements for c in among if not c.conditional) == packed
    assert sum(c.elements for c in among if c.conditional) == total


@auto
@pytest.mark.long
def test_what_surrounds_it(tmp_path):
    """Hyperparameters in the state, equal replicas, checkpoints."""
    between = exchange(STYLES["fully sharded"], sync_every=1)
    make = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
    run, state = running(
        slamb_jax.on_shards(make(0.01, exchange=between), between), between
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state, _ = run(state, TOKENS)
        slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)
        with slamb_jax.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state)
            back = checkpoints.restore(state).state
        assert_same_bits(back, state)
        for a, b in zip(*map(jax.tree.leaves, (back, state)), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        run(back, TOKENS)  # goes on


@auto
@pytest.mark.long
def test_other_transformations_on_shards():
    """``on_shards`` hands any transformation the shards, as a chain of links."""
    both = slamb_jax.on_shards(optax.chain(optax.clip(0.5), SLAMB), EXCHANGE)
    got = on_gradients(both)[0]
    assert_close(got, on_gradients(SLAMB, limit=0.5)[0], units=256)
    there = NamedSharding(got["up"].sharding.mesh, P(AXIS, None, "model"))
    assert got["up"].sharding.is_equivalent_to(there, 3)


@ALONE
@auto
@pytest.mark.parametrize("wrong", [True, False])
def test_copies_that_come_to_differ_are_refused(wrong):
    """A norm of one shard, with types not tracked, moves unsharded leaves apart."""
    clip = slamb_jax.on_shards(optax.clip_by_global_norm(1.0), EXCHANGE)
    tx = optax.chain(clip if wrong else optax.identity(), optax.sgd(0.1))
    run = functools.partial(on_gradients, tx, 1, check_vma=False)
    if wrong:
        with pytest.raises(ValueError, match=r"\['scale'\] .* differs .*'model'"):
            run()
    else:
        run()


@auto
def test_a_state_that_is_unlike_the_parameters_is_refused():
    tx = optax.stateless(lambda g, _: g)._replace(init=lambda params: jnp.ones(3))
    with pytest.raises(ValueError, match=r"state.* must be a scalar .* shape \(3,\)"):
        on_gradients(slamb_jax.on_shards(tx, EXCHANGE))


def test_sharded_arrays_are_not_gathered_to_be_replicated():
    mesh, spec = mesh_4x2(), P(None, "model")
    big = jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(mesh, spec))
    out = slamb_jax.replicate({"w": big}, mesh, exchange({"w": spec}))["w"]
    assert out.addressable_shards[0].data.shape == (1, 4, 4)
    np.testing.assert_array_equal(out, np.broadcast_to(big, (N, 4, 8)))


@pytest.mark.skipif(not OLD, reason="only jax 0.7 cannot")
def test_an_old_jax_says_so():
    with pytest.raises(NotImplementedError, match=r"newer than 0\.7, got 0\.7"):
        on_gradients(SLAMB)
