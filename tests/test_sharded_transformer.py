"""A transformer cut over a second mesh axis: numbers, traffic, what goes around."""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

import slamb_jax
from slamb_jax import Leaf, Strided
from tests.shards import CUT, N, Tiled, auto, mesh_4x2
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
    return P("model") if p.shape[0] % CUT == 0 else P(None, "model")


STYLES = {"tensor parallel": tensor_parallel, "fully sharded": fully_sharded}
MODEL = Transformer()
TOKENS = np.random.default_rng(0).integers(0, 64, (5, 16, 12))


def transformer_step(tx):
    def loss_of(params, tokens):
        logits = MODEL.apply({"params": params}, tokens[:, :-1])
        ce = optax.softmax_cross_entropy_with_integer_labels
        return ce(logits, tokens[:, 1:]).mean()

    def step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def transformer(style, seed=0):
    params = MODEL.init(jax.random.key(seed), TOKENS[0, :1, :-1])["params"]
    return params, jax.tree_util.tree_map_with_path(STYLES[style], params)


def running(tx, params, mesh, specs, check_vma=True):
    """The compiled step of all workers, and the state that it starts from."""
    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS, specs)
    run = slamb_jax.per_worker_step(
        transformer_step(tx), mesh, AXIS, param_specs=specs, check_vma=check_vma
    )
    return run, state


def moved(report):
    """What moves arrays, and does not sum: how often which kind, of what size."""
    kinds = ("all-gather", "all-to-all", "collective-permute")
    found = (c for c in report.collectives if c.kind in kinds)
    return collections.Counter((c.kind, c.elements) for c in found)


@auto
@pytest.mark.parametrize(
    ("style", "check_vma"),
    [
        ("fully sharded", True),
        ("tensor parallel", False),
        ("tensor parallel", True),
        ("fully sharded", False),
    ],
)
@pytest.mark.long
def test_nothing_is_gathered_that_dense_lamb_does_not_gather(style, check_vma):
    params, specs = transformer(style)
    mean = optax.stateless(
        lambda grads, _: slamb_jax.average_parameters(grads, axis_name=AXIS)
    )
    settings = {"axis_name": AXIS, "min_size": 500, "seed": 3, "sync_every": 4}
    tx = slamb_jax.slamb(0.1, param_specs=specs, **settings)
    reports = {}
    for name, one in (("lamb", optax.chain(mean, optax.lamb(0.1))), ("slamb", tx)):
        with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
            run, state = running(one, params, mesh_4x2(), specs, check_vma)
            reports[name] = slamb_jax.wire_report(run.lower(state, TOKENS[0]))
    assert not moved(reports["slamb"]) - moved(reports["lamb"])
    # Between workers go the packed shards, and the shards once in sync_every.
    shards = jax.tree.map(
        lambda p, spec: jnp.zeros(NamedSharding(mesh_4x2(), spec).shard_shape(p.shape)),
        params, specs,
    )  # fmt: skip
    strided = Strided(0.1, 500, 3)
    packed = 0
    for i, (shard, whole) in enumerate(
        zip(jax.tree.leaves(shards), jax.tree.leaves(params), strict=True)
    ):
        leaf = Leaf(i, 0, shard.shape, 0, shards=whole.size // shard.size)
        slots = jax.eval_shape(lambda t, leaf=leaf: strided.rows(t, leaf), jnp.int32(1))
        width = strided.width(leaf)
        packed += leaf.size if strided.whole(leaf) else slots.size * width
    between = [c for c in reports["slamb"].collectives if c.group_size == N]
    assert {c.kind for c in between} == {"all-reduce"}
    sent = sum(c.elements for c in between if not c.conditional)
    assert sent == packed
    network = slamb_jax.Network(N, 1e9)
    like = jax.tree.map(
        lambda p, spec: jax.ShapeDtypeStruct(
            p.shape, p.dtype, sharding=NamedSharding(mesh_4x2(), spec)
        ),
        params, specs,
    )  # fmt: skip
    cost = slamb_jax.advise(
        like, network, step_seconds=1.0, optimizer_seconds=(0, 0), min_size=500,
        sync_every=None,
    ).slamb  # fmt: skip
    wire = sum(c.wire_bytes for c in between if not c.conditional)
    assert cost.bytes_per_step == pytest.approx(wire, rel=0.01)
    average = sum(c.elements for c in between if c.conditional)
    assert average == sum(x.size for x in jax.tree.leaves(shards))
    # The norms are summed over the shards in one small all-reduce more.
    inner = [c.elements for c in reports["slamb"].collectives if c.group_size == CUT]
    assert min(inner) <= 4 * len(jax.tree.leaves(params))


@auto
@pytest.mark.long
@pytest.mark.parametrize("style", ["tensor parallel", "fully sharded"])
def test_a_transformer_trains_as_the_whole_one(style):
    params, specs = transformer(style)
    settings = {"axis_name": AXIS, "min_size": 500, "seed": 3, "sync_every": 3}
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    tiles = Tiled(Strided(0.25, 500, 3), tuple(leaves), 0)
    whole = slamb_jax.slamb(0.01, selection=tiles, **settings)
    cut = slamb_jax.slamb(0.01, compress_ratio=0.25, param_specs=specs, **settings)
    row = Mesh(np.array(jax.devices()[:N]), (AXIS,))
    both = [
        running(whole, params, row, None), running(cut, params, mesh_4x2(), specs)
    ]  # fmt: skip
    ends = []
    for run, state in both:
        losses = []
        for tokens in TOKENS:
            state, loss = run(state, tokens)
            losses.append(np.asarray(loss))
        ends.append((losses, slamb_jax.consolidate(state[0])))
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=2e-4)
    for a, b in zip(
        jax.tree.leaves(ends[0][1]), jax.tree.leaves(ends[1][1]), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)
    if style == "tensor parallel":
        up = ends[1][1]["Dense_0"]["kernel"].sharding
        assert up.spec == P(None, "model")


@auto
@pytest.mark.long
def test_what_goes_around_it(tmp_path):
    """Hyperparameters in the state, skipped steps, checkpoints, equal replicas."""
    params, specs = transformer("fully sharded")
    make = optax.inject_hyperparams(slamb_jax.slamb, static_args=slamb_jax.STATIC_ARGS)
    inner = make(0.01, axis_name=AXIS, min_size=500, param_specs=specs, sync_every=1)
    tx = slamb_jax.skip_not_finite(slamb_jax.on_shards(inner, specs), AXIS)
    run, state = running(tx, params, mesh_4x2(), specs)
    state, _ = run(state, TOKENS[0])
    params, opt_state = state
    embed = jax.tree.map(lambda p: p.at[0, 0].set(jnp.nan), params["Embed_0"])
    poisoned = params | {"Embed_0": embed}
    before = jax.device_get(opt_state)
    (_, after), _ = run((poisoned, opt_state), TOKENS[1])
    assert int(after.total_notfinite[0]) == 1
    for a, b in zip(
        jax.tree.leaves(after.inner), jax.tree.leaves(before.inner), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    run, state = running(tx, transformer("fully sharded")[0], mesh_4x2(), specs)
    state, _ = run(state, TOKENS[0])
    slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        back = checkpoints.restore(state).state
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
    state, _ = run(back, TOKENS[1])  # goes on
