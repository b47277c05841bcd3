"""A transformer sharded over a second mesh axis: its traffic, and what surrounds it."""

import collections

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from slamb_jax.selections import Leaf, Strided, elements_sent
from tests.close import assert_same_bits
from tests.compiled import compile_optimized
from tests.optimizers import train_step
from tests.shards import SHARDS, N, auto, mesh_4x2
from tests.workers import AXIS, P


class Transformer(nn.Module):
    """A block of attention and MLP over embedded tokens."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 32)
        x = embed(tokens)
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(h, mask=nn.make_causal_mask(tokens))
        h = nn.Dense(128)(nn.LayerNorm()(x))
        return embed.attend(x + nn.Dense(32)(nn.gelu(h)))


def tensor_parallel(path, p):
    """Heads and hidden units over "model", as in Megatron."""
    name = jax.tree_util.keystr(path)
    if "query" in name or "key" in name or "value" in name:
        return P(None, "model", None) if p.ndim == 3 else P("model", None)
    if "'out'" in name and p.ndim == 3:
        return P("model", None, None)
    if "Dense_0" in name:
        return P(None, "model") if p.ndim == 2 else P("model")
    if "Dense_1" in name and p.ndim == 2:
        return P("model", None)
    return P("model") if "embedding" in name else P()


def fully_sharded(path, p):
    """Every matrix along its first dimension that divides, whatever it is."""
    if p.ndim < 2:
        return P()
    return P("model") if p.shape[0] % SHARDS == 0 else P(None, "model")


STYLES = {"tensor parallel": tensor_parallel, "fully sharded": fully_sharded}
MODEL = Transformer()
CHOICE = Strided(0.1, min_size=500, seed=3)
SELECTED = {"payload": None, "selection": CHOICE}
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 16, 12))
pytestmark = [pytest.mark.long, auto]


def transformer(style):
    params = MODEL.init(jax.random.key(0), TOKENS[0, :1, :-1])["params"]
    return params, jax.tree_util.tree_map_with_path(STYLES[style], params)


def running(tx, params, exchange, check_vma=True):
    """The step of all workers, and the state that it starts from."""

    def loss_of(params, tokens):
        logits = MODEL.apply({"params": params}, tokens[:, :-1])
        ce = optax.softmax_cross_entropy_with_integer_labels
        return ce(logits, tokens[:, 1:]).mean()

    step, mesh = train_step(tx, loss_of), mesh_4x2()
    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    return slamb_jax.per_worker_step(step, mesh, exchange, check_vma=check_vma), state


def report_of(*args):
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        run, state = running(*args)
        return slamb_jax.wire_report(compile_optimized(run.lower(state, TOKENS[0])))


def moved(report):
    """What moves arrays within a worker, and does not sum: which kind, what size."""
    kinds = ("all-gather", "all-to-all", "collective-permute")
    found = (c for c in report.collectives if c.kind in kinds and c.group_size != N)
    return collections.Counter((c.kind, c.elements) for c in found)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("settings", [SELECTED | {"sync_every": 4}, {}])
def test_nothing_is_gathered_that_dense_lamb_does_not_gather(
    style, check_vma, settings
):
    params, specs = transformer(style)
    exchange = slamb_jax.Exchange(AXIS, param_specs=specs, **settings)
    mean = optax.stateless(
        lambda grads, _: slamb_jax.average_parameters(grads, axis_name=AXIS)
    )
    lamb = optax.chain(mean, optax.lamb(0.1))
    dense = report_of(lamb, params, exchange, check_vma)
    report = report_of(slamb_jax.slamb(0.1, exchange), params, exchange, check_vma)
    assert not moved(report) - moved(dense)
    # The norms are summed over the shards in one small all-reduce more.
    inner = [c.elements for c in report.collectives if c.group_size == SHARDS]
    assert min(inner) <= 4 * len(jax.tree.leaves(params))
    # Between workers: of a selection the packed shards, and all once in sync_every.
    between = [c for c in report.collectives if c.group_size == N]
    shards = jax.tree.map(
        lambda p, spec: np.empty(NamedSharding(mesh_4x2(), spec).shard_shape(p.shape)),
        params, specs,
    )  # fmt: skip
    packed = total = 0
    for i, (p, shard) in enumerate(
        zip(*map(jax.tree.leaves, (params, shards)), strict=True)
    ):
        leaf = Leaf(i, shard.shape, shards=p.size // shard.size)
        packed += elements_sent(CHOICE, leaf)
        total += leaf.size
    if not settings:
        assert {c.kind for c in between} == {"all-to-all", "all-gather"}
        assert sum(c.wire_bytes for c in between) < 0.1 * 8 * total
        return
    assert {c.kind for c in between} == {"all-reduce"}
    assert sum(c.elements for c in between if not c.conditional) == packed
    assert sum(c.elements for c in between if c.conditional) == total


def test_what_surrounds_it(tmp_path):
    """Hyperparameters in the state, equal replicas, checkpoints."""
    params, specs = transformer("fully sharded")
    exchange = slamb_jax.Exchange(AXIS, param_specs=specs, **SELECTED)
    make = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
    tx = slamb_jax.on_shards(make(0.01, exchange=exchange), exchange)
    run, state = running(tx, params, exchange)
    state, _ = run(state, TOKENS[0])
    slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        back = checkpoints.restore(state).state
    assert_same_bits(back, state)
    for a, b in zip(*map(jax.tree.leaves, (back, state)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
    run(back, TOKENS[1])  # goes on
