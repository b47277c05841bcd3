"""Parameters cut over a second mesh axis: numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding

import slamb_jax
from slamb_jax import Strided
from tests.shards import OLD, N, Tiled, auto, mesh_4x2
from tests.workers import AXIS, P

SPECS = {
    "embed": P("model", None), "up": P(None, "model"), "bias": P("model"),
    "down": P("model"), "conv": P(None, None, "model"), "scale": None, "whole": P(),
}  # fmt: skip
SHAPES = {
    "embed": (36, 12), "up": (12, 48), "bias": (48,), "down": (48, 12),
    "conv": (3, 2, 8, 10), "scale": (12,), "whole": (12, 10),
}  # fmt: skip
SETTINGS = {"b3": 0.6, "min_size": 60, "sync_every": 3, "weight_decay": 0.1, "seed": 3}


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


CASES = [
    ("manual", "sum", True), ("auto", "product", True),
    pytest.param("manual", "product", False, marks=pytest.mark.long),
    pytest.param("auto", "sum", False, marks=pytest.mark.long),
    pytest.param("links", "product", True, marks=pytest.mark.long),
    pytest.param("manual", "sum", False, marks=pytest.mark.long),
    pytest.param("manual", "product", True, marks=pytest.mark.long),
    pytest.param("auto", "sum", True, marks=pytest.mark.long),
    pytest.param("auto", "product", False, marks=pytest.mark.long),
    pytest.param("links auto", "sum", True, marks=pytest.mark.long),
    pytest.param("links auto", "sum", False, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize(("how", "form", "check_vma"), CASES)
def test_shards_follow_the_whole_model(how, form, check_vma):
    if OLD and "auto" in how:
        pytest.skip("needs a jax newer than 0.7")
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


@auto
def test_without_a_mesh_that_has_the_axes():
    tx = slamb_jax.slamb(0.1, param_specs={"w": P("model")})
    params = {"w": jnp.ones((4, 4))}
    with pytest.raises(ValueError, match="'model', and the mesh here has none"):
        tx.update(params, tx.init(params), params)


def test_cut_arrays_are_not_gathered_to_be_replicated():
    mesh = mesh_4x2()
    there = NamedSharding(mesh, P(None, "model"))
    big = jax.device_put(jnp.arange(32.0).reshape(4, 8), there)
    out = slamb_jax.replicate({"w": big}, mesh, AXIS, {"w": P(None, "model")})["w"]
    assert out.addressable_shards[0].data.shape == (1, 4, 4)
    np.testing.assert_array_equal(out, np.broadcast_to(big, (N, 4, 8)))


@pytest.mark.skipif(not OLD, reason="only jax 0.7 cannot")
def test_an_old_jax_says_so():
    params = draw(SHAPES, 0)
    tx = slamb_jax.slamb(0.1, axis_name=AXIS, param_specs=SPECS)
    with pytest.raises(NotImplementedError, match=r"newer than 0\.7, got 0\.7"):
        trained(params, [draw(SHAPES, 1, N)], tx, mesh_4x2(), SPECS)
