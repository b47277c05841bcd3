"""What optax asks of a transformation, of every public one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from tests.workers import P, mesh_of

STRIDED = slamb_jax.Strided(0.25, 4)
ALL = {
    "slamb": functools.partial(slamb_jax.slamb, 0.01, selection=STRIDED),
    "slamb_product": functools.partial(
        slamb_jax.slamb, optax.constant_schedule(0.01), selection=STRIDED,
        form="product", weight_decay=optax.constant_schedule(0.1),
        mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
    ),
    "slamb_16_bit": functools.partial(
        slamb_jax.slamb, 0.01, selection="permutation", min_size=4, mu_dtype="bfloat16"
    ),
    "mask_momentum": lambda: slamb_jax.mask_momentum(
        slamb_jax.randk_compress_with_error_feedback(STRIDED, keep_residual=False)
    ),
    "mask_momentum_with_residual": lambda: slamb_jax.mask_momentum(
        slamb_jax.randk_compress_with_error_feedback(STRIDED)
    ),
    "randk_compress_with_error_feedback": functools.partial(
        slamb_jax.randk_compress_with_error_feedback, STRIDED
    ),
    "elementwise_rescale": functools.partial(slamb_jax.elementwise_rescale, STRIDED),
    "layerwise_trust_ratio": functools.partial(
        slamb_jax.layerwise_trust_ratio, STRIDED, weight_decay=0.1
    ),
    "slamb_payload": functools.partial(
        slamb_jax.slamb, 0.01, selection=STRIDED, payload="bfloat16",
        average_payload=slamb_jax.StochasticUniform(4),
    ),
    "average_gradients": lambda: slamb_jax.average_gradients(None),
    "average_parameters_every": lambda: slamb_jax.average_parameters_every(3, None),
    "accumulate": lambda: slamb_jax.accumulate(
        slamb_jax.slamb(0.01, selection=STRIDED), 2
    ),
    "jointspar": lambda: slamb_jax.jointspar(0.01, "all", 0.6),
    "jointspar_lars": lambda: slamb_jax.jointspar_lars(
        optax.constant_schedule(0.01), "all", 0.6, weight_decay=0.1
    ),
}  # fmt: skip
DRAWS = {"jointspar", "jointspar_lars"}  # their state has probabilities
NEEDS_PARAMS = {
    "slamb", "slamb_product", "slamb_16_bit", "slamb_payload", "layerwise_trust_ratio",
    "average_parameters_every", "accumulate", "jointspar_lars",
}  # fmt: skip
each = pytest.mark.parametrize("name", ALL)


def tree(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    return {
        "w": new(5, 7),
        "deep": [new(4, 4, 3), None, (new(1, 1), new(0, 3))],
        "scalar": new(),
        "bias": new(6),
    }


def types_of(tree):
    return jax.tree.map(jax.typeof, tree)


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_types_are_kept_and_step_two_does_not_recompile(name, dtype):
    tx = ALL[name]()
    params, grads = tree(dtype), tree(dtype, 1)
    state = tx.init(params)
    update = jax.jit(tx.update)
    before = types_of(state)
    for _ in range(3):
        updates, state = update(grads, state, params)
        assert types_of(updates) == types_of(params)
        assert types_of(state) == before
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


@each
def test_unknown_extra_arguments_are_accepted(name):
    tx = ALL[name]()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    params = tree()
    update = jax.jit(lambda g, s, p: tx.update(g, s, p, loss=1.0, anything=None))
    update(tree(seed=1), tx.init(params), params)


@each
def test_missing_params(name):
    tx = ALL[name]()
    state = tx.init(tree())
    if name not in NEEDS_PARAMS:
        tx.update(tree(seed=1), state)
        return
    with pytest.raises(ValueError, match="params"):
        tx.update(tree(seed=1), state)


@each
def test_init_on_shapes_alone(name):
    tx = ALL[name]()
    shapes = jax.eval_shape(lambda: tree())
    from_shapes = jax.eval_shape(tx.init, shapes)
    assert types_of(tx.init(tree())) == jax.tree.map(
        lambda x: jax.typeof(jnp.zeros(x.shape, x.dtype)), from_shapes
    )
    for leaf in jax.tree.leaves(tx.init(shapes)):
        assert isinstance(leaf, jax.Array)


@each
def test_a_gradient_that_is_none_leaves_its_parameter_alone(name):
    """And does not shift the turns of the leaves behind it."""
    tx = ALL[name]()
    params, grads = tree(), tree(seed=1)
    full, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    missing = grads | {"bias": None}
    state = tx.init(params)
    updates, new_state = jax.jit(tx.update)(missing, state, params)
    assert updates["bias"] is None
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        updates,
        full | {"bias": None},
    )


@each
def test_masked_and_partitioned(name):
    params, grads = tree(), tree(seed=1)
    only = {"w": True, "deep": False, "scalar": True, "bias": False}
    tx = optax.masked(ALL[name](), only)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["bias"], grads["bias"])
    labels = {"w": "a", "deep": "b", "scalar": "a", "bias": "b"}
    tx = optax.multi_transform({"a": ALL[name](), "b": optax.set_to_zero()}, labels)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert not updates["bias"].any()
    assert updates["w"].shape == params["w"].shape


@each
def test_tree_map_params(name):
    """optax tells the parts of the state that are like the parameters from counts."""
    tx = ALL[name]()
    params = tree()
    state = tx.init(params)
    marked = optax.tree.map_params(
        tx, lambda x: "like params", state, transform_non_params=lambda x: "other"
    )
    others = [
        x.dtype
        for mark, x in zip(jax.tree.leaves(marked), jax.tree.leaves(state), strict=True)
        if mark == "other"
    ]
    allowed = {"int32", "float32"} if name in DRAWS else {"int32"}
    assert {str(dtype) for dtype in others} <= allowed
    like_params = len(jax.tree.leaves(state)) - len(others)
    assert like_params % len(jax.tree.leaves(params)) == 0


@each
def test_multi_steps(name):
    params, grads = tree(), [tree(seed=t) for t in range(4)]
    plain = ALL[name]()
    many = optax.MultiSteps(plain, 2)
    with jax.numpy_dtype_promotion("standard"):  # optax.MultiSteps needs it
        state, expected = many.init(params), plain.init(params)
        step_many, step_plain = jax.jit(many.update), jax.jit(plain.update)
        for t in range(0, 4, 2):
            for g in grads[t : t + 2]:
                updates, state = step_many(g, state, params)
            mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads[t : t + 2])
            want, expected = step_plain(mean, expected, params)
            if name != "accumulate":
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7),
                    updates,
                    want,
                )


@each
def test_sharding_of_the_state_is_that_of_the_parameters(name):
    sharding = NamedSharding(mesh_of(4), P("data"))
    params = {"w": jax.device_put(jnp.ones((8, 6)), sharding), "b": jnp.ones(3)}
    tx = ALL[name]()
    state = jax.jit(tx.init)(params)
    update = jax.jit(tx.update)
    updates, new_state = update(params, state, params)
    again, _ = update(params, new_state, params)
    assert jax.tree.structure(again) == jax.tree.structure(updates)
    for leaf in jax.tree.leaves(tx.init(params)):
        assert leaf.ndim == 0 or leaf.shape == (3,) or leaf.sharding == sharding


@each
def test_an_empty_tree(name):
    tx = ALL[name]()
    updates, _ = jax.jit(tx.update)({}, tx.init({}), {})
    assert updates == {}


@each
def test_all_zero_gradients_and_parameters_give_no_nan(name):
    tx = ALL[name]()
    zero = jax.tree.map(jnp.zeros_like, tree())
    for params in (zero, tree()):
        updates, state = jax.jit(tx.update)(zero, tx.init(params), params)
        for x in jax.tree.leaves((updates, state)):
            assert jnp.isfinite(x).all()


def test_inject_hyperparams_gives_the_same_numbers():
    settings = {
        "b1": 0.8, "b2": 0.99, "b3": 0.9, "eps": 1e-5, "weight_decay": 0.1,
        "c_min": 0.1, "c_max": 5.0,
    }  # fmt: skip
    for form in ("sum", "product"):
        fixed = {
            "form": form,
            "min_size": 4,
            "compress_ratio": 0.25,
            "mu_dtype": "bfloat16",
        }
        injected = optax.inject_hyperparams(
            slamb_jax.slamb, static_args=slamb_jax.STATIC_ARGS
        )(learning_rate=optax.constant_schedule(0.01), **settings, **fixed)
        plain = slamb_jax.slamb(0.01, **settings, **fixed)
        params = tree()
        state, expected = injected.init(params), plain.init(params)
        assert set(state.hyperparams) == {"learning_rate", *settings}
        update = jax.jit(injected.update)
        for t in range(3):
            updates, state = update(tree(seed=t), state, params)
            want, expected = plain.update(tree(seed=t), expected, params)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-5),
                updates,
                want,
            )
        assert update._cache_size() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_inject_hyperparams_in_float32_with_narrow_parameters(dtype):
    tx = optax.inject_hyperparams(
        slamb_jax.slamb, static_args=slamb_jax.STATIC_ARGS, hyperparam_dtype=jnp.float32
    )(learning_rate=0.01, min_size=4)
    params = tree(dtype)
    updates, _ = jax.jit(tx.update)(tree(dtype, 1), tx.init(params), params)
    assert types_of(updates) == types_of(params)
    want, _ = slamb_jax.slamb(0.01, min_size=4).update(
        tree(dtype, 1), slamb_jax.slamb(0.01, min_size=4).init(params), params
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02
        ),
        updates,
        want,
    )


def test_static_arguments_that_were_traced_are_named():
    tx = optax.inject_hyperparams(slamb_jax.slamb)(learning_rate=0.01)
    with pytest.raises(ValueError, match=r"compress_ratio.*STATIC_ARGS"):
        tx.init(tree())


def test_gradients_narrower_than_parameters():
    params, grads = tree(), tree("bfloat16", 1)
    tx = ALL["slamb"]()
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert types_of(updates) == types_of(params)
