"""What optax asks of a transformation, of every public function that returns one."""

import dataclasses
import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import slamb_jax
from slamb_jax import jointspar
from slamb_jax.links import directions
from tests.arguments import ARGUMENTS, PAPER, public
from tests.close import assert_close
from tests.shards import mesh_with
from tests.workers import P

MEAN = slamb_jax.Exchange()
LOCAL = slamb_jax.Exchange(
    payload=None, sync_every=2, outer=optax.sgd(0.7, momentum=0.9, nesterov=True)
)
STACKED = dataclasses.replace(
    LOCAL, stacked=lambda params: jax.tree.map(lambda x: x.ndim > 2, params)
)
B1 = {"b1": 0.8}  # a number in place of a tree
SLAMB = slamb_jax.slamb(0.01, PAPER)
TABLE = {  # by the names of the public functions: with other values than the defaults
    name: make(**ARGUMENTS[make] | (B1 if "b1" in ARGUMENTS[make] else {}))
    for name, make in public()
}
TABLE |= {  # and with these
    "slamb sum": SLAMB,
    "adamw local": slamb_jax.adamw(0.01, LOCAL),
    "muon local": slamb_jax.muon(0.01, STACKED, weight_decay=0.1),
    "sgd local": slamb_jax.sgd(0.01, LOCAL, momentum=0.9),
    "mask_momentum no v": slamb_jax.mask_momentum(
        MEAN, optax.scale_by_sign(), 0.5, None, bias_correction=False
    ),
    "mask_momentum selection": slamb_jax.mask_momentum(PAPER, mu_dtype="bfloat16"),
    "directions.adam": slamb_jax.mask_momentum(MEAN, directions.adam()),
    "layerwise_trust_ratio mean": slamb_jax.layerwise_trust_ratio(MEAN),
    "average_parameters_every": slamb_jax.average_parameters_every(PAPER),
    "average_parameters_every outer": slamb_jax.average_parameters_every(LOCAL),
    "accumulate": slamb_jax.accumulate(slamb_jax.adamw(0.1, MEAN), 2),
    "skip_not_finite": slamb_jax.skip_not_finite(SLAMB, PAPER),
    "on_shards": slamb_jax.on_shards(SLAMB, PAPER),
    "jointspar": jointspar.jointspar(optax.lars(0.01), MEAN, "all", 0.6),
}
RANDK = "randk_compress_with_error_feedback"
# They keep the dtype of gradients.
OF_GRADIENTS = {"average_gradients", "elementwise_rescale", RANDK,
                "compress_with_error_feedback"}  # fmt: skip
MOMENTA = {"mask_momentum", "directions.adam", "directions.muon"}  # are in float32
# Under explicit axes jax does not gather the blocks of a selection.
NEEDS_AUTO = {"slamb", "slamb sum", "mask_momentum selection", RANDK, "on_shards",
              "skip_not_finite"}  # fmt: skip
each = pytest.mark.parametrize("name", TABLE)


def tree(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))  # noqa: E731
    return {
        "w": new(5, 7),
        "deep": [new(4, 4, 3), None, (new(1, 1), new(0, 3))],
        "scalar": new(),
        "bias": new(6),
    }


def shapes(dtype="float32"):
    return jax.eval_shape(functools.partial(tree, dtype))


@functools.cache
def compiled(name):
    """The transformation's update, compiled once for this file."""
    return jax.jit(TABLE[name].update)


@each
def test_types_are_kept(name):
    """So step two does not recompile; unknown extra arguments are accepted."""
    tx, function = TABLE[name], name.split()[0]
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    update = functools.partial(tx.update, loss=1.0, anything=None)
    f16, bf16, f32 = "float16", "bfloat16", "float32"
    for grads, params in ((f16, f16), (bf16, f32), (f32, bf16)):
        state = jax.eval_shape(tx.init, shapes(params))
        updates, after = jax.eval_shape(update, shapes(grads), state, shapes(params))
        assert after == state
        # Between the links of a chain updates are not rounded.
        kept = {"average_parameters_every", *OF_GRADIENTS}
        wide = {"layerwise_trust_ratio", *MOMENTA}
        dtype = grads if function in kept else params
        assert updates == shapes("float32" if function in wide else dtype)


@each
def test_it_runs(name):
    """Without a second compilation, without NaN where all is zero."""
    tx, update, params = TABLE[name], compiled(name), tree()
    zero, state = jax.tree.map(jnp.zeros_like, params), tx.init(params)
    for t in range(1, 4):
        updates, state = update(tree(seed=t), state, params)
        params = optax.apply_updates(params, updates)
    outputs = [update(zero, tx.init(p), p) for p in (zero, tree())]
    assert update._cache_size() == 1
    for x in jax.tree.leaves((params, state, outputs)):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert np.isfinite(np.asarray(x, np.float32)).all()


@each
def test_a_gradient_that_is_none_leaves_its_parameter_alone(name):
    """And the leaves after it keep their places in the selection."""
    tx, update = TABLE[name], compiled(name)
    params, grads = tree(), tree(seed=1)
    state = tx.init(params)
    full, _ = update(grads, state, params)
    updates, after = update(grads | {"bias": None}, state, params)
    assert updates["bias"] is None
    assert jax.tree.structure(after) == jax.tree.structure(state)
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    units = 4096 if "muon" in name else 64
    assert_close(updates, full | {"bias": None}, units=units)


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_init_on_shapes_alone_is_that_on_arrays(name, dtype):
    init = TABLE[name].init
    traced = jax.eval_shape(init, shapes(dtype))
    for params in (tree(dtype), shapes(dtype)):
        state = init(params)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
        assert jax.eval_shape(lambda state=state: state) == traced


@each
def test_missing_params_are_told_where_they_are_needed(name):
    tx = TABLE[name]
    needs = name.split()[0] not in OF_GRADIENTS | MOMENTA
    told = pytest.raises(ValueError, match="params must be passed to update, got None")
    with told if needs else nullcontext():
        jax.eval_shape(tx.update, shapes(), jax.eval_shape(tx.init, shapes()))


@each
def test_optax_takes_it(name):
    tx, params = TABLE[name], shapes()
    only = {"w": True, "deep": False, "scalar": True, "bias": False}
    for wrapped in (optax.masked(tx, only), optax.MultiSteps(tx, 2)):
        with jax.numpy_dtype_promotion("standard"):  # optax.MultiSteps needs it
            state = jax.eval_shape(wrapped.init, params)
            updates, after = jax.eval_shape(wrapped.update, params, state, params)
        assert (updates, after) == (params, state)
    empty = jax.eval_shape(tx.init, {})
    assert jax.eval_shape(tx.update, {}, empty, {})[0] == {}
    # optax tells the parts of the state that are like the parameters from counts.
    state = jax.eval_shape(tx.init, params)
    marked = optax.tree.map_params(
        tx, lambda x: "like params", state, transform_non_params=lambda x: "other"
    )
    pairs = zip(jax.tree.leaves(marked), jax.tree.leaves(state), strict=True)
    others = [x for mark, x in pairs if mark == "other"]
    assert all(x.ndim <= 2 for x in others)  # counts, keys, what a selection keeps
    alike = len(jax.tree.leaves(state)) - len(others)
    # Of Muon, v is of the leaves that are no matrices.
    assert "muon" in name or alike % len(jax.tree.leaves(params)) == 0


@each
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_state_is_sharded_like_the_parameters(name, kind):
    """And its types, which tell it of explicit axes, stay, as optax tests its own."""
    mesh = mesh_with({"data": 4}, kind)
    there = NamedSharding(mesh, P("data"))
    tx, types = TABLE[name], functools.partial(jax.tree.map, jax.typeof)
    with jax.set_mesh(mesh):
        params = {"w": jax.device_put(jnp.ones((8, 64)), there)}
        state = tx.init(params)
        like = [x for x in jax.tree.leaves(state) if x.shape == (8, 64)]
        assert all(x.sharding.is_equivalent_to(there, 2) for x in like)
        if kind == AxisType.Explicit and name not in NEEDS_AUTO:
            assert types(jax.jit(tx.init)(params)) == types(state)
            eager = [tx.update] if name in ("adamw", "lion", "muon local") else []
            for update in (jax.jit(tx.update), *eager):
                updates, after = update(params, state, params)
                assert types(after) == types(state)
                assert types(updates) == types(params)
