"""Parameters cut over a second mesh axis: the numbers and traffic of the whole model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

import slamb_jax
from slamb_jax import Leaf, Strided
from tests.workers import AXIS, P

N, CUT = 4, 2
SPECS = {
    "embed": P("model", None), "up": P(None, "model"), "bias": P("model"),
    "down": P("model"), "conv": P(None, None, "model"), "scale": None, "whole": P(),
}  # fmt: skip
SHAPES = {
    "embed": (36, 12), "up": (12, 48), "bias": (48,), "down": (48, 12),
    "conv": (3, 2, 8, 10), "scale": (12,), "whole": (12, 10),
}  # fmt: skip
SETTINGS = {"b3": 0.6, "min_size": 60, "sync_every": 3, "weight_decay": 0.1, "seed": 3}


def mesh_4x2():
    return Mesh(np.array(jax.devices()[: N * CUT]).reshape(N, CUT), (AXIS, "model"))


@dataclasses.dataclass(frozen=True)
class Tiled:
    """On whole leaves, the masks that a selection has on the shards of each."""

    inner: Strided
    specs: tuple  # of the leaves, in order
    total: int  # elements of one device's shards

    def _of_shard(self, leaf):
        spec = self.specs[leaf.index] or P()
        cuts = [CUT if "model" in (e or ()) else 1 for e in spec]
        cuts += [1] * (len(leaf.shape) - len(cuts))
        shape = tuple(n // c for n, c in zip(leaf.shape, cuts, strict=True))
        parts = int(np.prod(cuts))
        shard = Leaf(leaf.index, 0, shape, self.total, leaf.stacked, parts)
        return shard, cuts

    def whole(self, leaf):
        return self.inner.whole(self._of_shard(leaf)[0])

    def width(self, leaf):
        return 1

    def age(self, step, leaf):
        shard, cuts = self._of_shard(leaf)
        age = self.inner.age(step, shard)
        age = jnp.repeat(age, self.inner.width(shard), 0).reshape(shard.shape)
        return jnp.tile(age, cuts).reshape(-1, 1)

    def rows(self, step, leaf):
        shard, _ = self._of_shard(leaf)
        slots = -(-shard.size // self.inner.turns) + 128
        most = slots * (leaf.size // shard.size)
        sent = self.age(step, leaf)[:, 0] == 0
        return jnp.nonzero(sent, size=most, fill_value=leaf.size)[0].astype(jnp.int32)


def tiled(params, specs, **settings):
    inner = Strided(0.25, settings["min_size"], settings["seed"])
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: x is None or isinstance(x, P))
    return Tiled(inner, tuple(leaves), 0)


def draw(shapes, seed, *lead):
    rng = np.random.default_rng(seed)
    return {
        k: jnp.asarray(rng.normal(size=(*lead, *s)), jnp.float32)
        for k, s in shapes.items()
    }


def reference(params, grads, tx):
    """The whole model on each worker, one device each."""
    mesh = Mesh(np.array(jax.devices()[:N]), (AXIS,))
    return trained(params, grads, tx, mesh)


def trained(params, grads, tx, mesh, specs=None, check_vma=True):
    def step(state, g):
        params, opt_state = state
        g = jax.tree.map(lambda x: jnp.squeeze(x, 0), g)
        updates, opt_state = tx.update(g, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), 0.0 * params["scale"]

    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS, specs)
    run = slamb_jax.per_worker_step(
        step, mesh, AXIS, param_specs=specs, check_vma=check_vma
    )
    for g in grads:
        state, _ = run(state, g)
    return state


def manual(params, grads, tx, specs, check_vma=True, update=None):
    """Everything inside one shard_map over both axes."""
    mesh = mesh_4x2()
    tree = jax.tree.map(lambda p: P(), params) | {k: s or P() for k, s in specs.items()}
    lead = jax.tree.map(lambda s: P(AXIS, *s), tree)
    opt_state = tx.init(params)
    like = jax.tree.structure(params)
    is_params = lambda x: jax.tree.structure(x) == like  # noqa: E731
    state_specs = jax.tree.map(
        lambda x: lead if is_params(x) else P(AXIS), opt_state, is_leaf=is_params
    )

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(lead, state_specs, lead),
        out_specs=(lead, state_specs), check_vma=check_vma,
    )  # fmt: skip
    def run(params, state, g):
        params, state, g = jax.tree.map(lambda x: x[0], (params, state, g))
        u, state = tx.update(g, state, params)
        out = optax.apply_updates(params, u), state
        return jax.tree.map(lambda x: x[None], out)

    stack = lambda x: jnp.stack([x] * N)  # noqa: E731
    state = jax.tree.map(stack, (params, opt_state))
    for g in grads:
        state = run(*state, g)
    return state


def close(got, want):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=3e-5, atol=3e-6, err_msg=str(path)
        )


def chain(form, selection, specs):
    """The links by hand."""
    laid = {"param_specs": specs}
    compressor = slamb_jax.randk_compress_with_error_feedback(
        selection, axis_name=AXIS, keep_residual=False, **laid
    )
    return optax.chain(
        slamb_jax.mask_momentum(compressor, form=form),
        slamb_jax.layerwise_trust_ratio(
            selection, 0.6, axis_name=AXIS, weight_decay=0.1, form=form, **laid
        ),
        slamb_jax.elementwise_rescale(selection, 0.6, axis_name=AXIS, **laid),
        optax.scale_by_learning_rate(0.1),
        slamb_jax.average_parameters_every(3, AXIS),
    )


@pytest.mark.parametrize("form", ["sum", "product"])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("how", ["manual", "auto", "links", "links auto"])
def test_shards_follow_the_whole_model(form, check_vma, how):
    params = draw(SHAPES, 0)
    grads = [draw(SHAPES, t, N) for t in range(1, 8)]
    selection = tiled(params, [SPECS[k] for k in sorted(SPECS)], **SETTINGS)
    whole = slamb_jax.slamb(
        0.1, axis_name=AXIS, form=form, selection=selection, **SETTINGS
    )
    want = reference(params, grads, whole)
    if "links" in how:
        tx = chain(form, selection.inner, SPECS)
        tx = slamb_jax.on_shards(tx, SPECS) if "auto" in how else tx
    else:
        tx = slamb_jax.slamb(
            0.1, axis_name=AXIS, form=form, compress_ratio=0.25, param_specs=SPECS,
            **SETTINGS,
        )  # fmt: skip
    if "auto" in how:
        got = trained(params, grads, tx, mesh_4x2(), SPECS, check_vma)
        up = got[0]["up"].sharding
        assert up.is_equivalent_to(NamedSharding(up.mesh, P(AXIS, None, "model")), 3)
    else:
        got = manual(params, grads, tx, SPECS, check_vma)
    close(got, want)
