"""What optax asks of a transformation, of every public function that returns one."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from slamb_jax import directions, jointspar, links, wrappers
from tests.close import assert_close
from tests.optimizers import plain
from tests.workers import P, mesh_of

EXCHANGE = plain(compress_ratio=0.25, min_size=4, sync_every=3)
CODED = plain(
    compress_ratio=0.25, min_size=4, payload="bfloat16", average_payload="uniform4"
)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
LOCAL = plain(compress_ratio=0, sync_every=2, outer=OUTER)
ROLLING = plain(compress_ratio=0.25, min_size=4, sync_every=3, rolling=True)
RATE = optax.constant_schedule(0.01)


def not_vectors(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def slamb(rate=0.01, exchange=EXCHANGE, **settings):
    return slamb_jax.slamb(rate, exchange, **settings)


PRODUCT = {"form": "product", "weight_decay": RATE, "mask": not_vectors}
PHASES = plain(compress_ratio={0: 1.0, 2: 0.25}, min_size=4)
FEEDBACK = slamb_jax.randk_compress_with_error_feedback(EXCHANGE)
TABLE = {  # for each public function: its variants
    "slamb": {
        "": slamb(),
        "product": slamb(RATE, **PRODUCT),
        "16 bits": slamb(mu_dtype="bfloat16", nu_dtype="bfloat16"),
        "codes": slamb(exchange=CODED),
        "phases": slamb(exchange=PHASES),
    },
    "adamw": {
        "": slamb_jax.adamw(0.01, EXCHANGE),
        "nesterov": slamb_jax.adamw(RATE, EXCHANGE, nesterov=True, mask=not_vectors),
        "16 bits": slamb_jax.adamw(
            0.01, EXCHANGE, nu_of="momentum", mu_dtype="bfloat16", nu_dtype="bfloat16"
        ),
        "rolling": slamb_jax.adamw(0.01, ROLLING),
    },
    "lion": {"codes": slamb_jax.lion(RATE, CODED, mask=not_vectors)},
    "muon": {
        "": slamb_jax.muon(0.01, EXCHANGE),
        "16 bits": slamb_jax.muon(
            RATE, LOCAL, mu_dtype="bfloat16", weight_decay=0.1, nesterov=False
        ),
    },
    "sgd": {
        "16 bits": slamb_jax.sgd(
            RATE, LOCAL, momentum=0.9, nesterov=True, accumulator_dtype="bfloat16"
        ),
    },
    "average_momentum": {
        "": slamb_jax.average_momentum(CODED),
        "16 bits": slamb_jax.average_momentum(
            CODED, b1=0.5, b2=0.9, mu_dtype="bfloat16", nu_dtype="bfloat16"
        ),
    },
    "scale_by_slamb": {"": slamb_jax.scale_by_slamb(EXCHANGE)},
    "mask_momentum": {
        "": slamb_jax.mask_momentum(EXCHANGE),
        "local": slamb_jax.mask_momentum(EXCHANGE, compressor=optax.identity()),
    },
    "directions.adam": {
        "alone": directions.adam(nu_of="momentum"),
        "16 bits": slamb_jax.mask_momentum(
            EXCHANGE, directions.adam(eps=1e-6, form="sum", nu_dtype="bfloat16")
        ),
    },
    "directions.lion": {
        "": slamb_jax.mask_momentum(
            EXCHANGE, directions.lion(), b1=0.99, bias_correction=False
        )
    },
    "directions.muon": {
        "alone": directions.muon(consistent_rms=0.2),
    },
    "randk_compress_with_error_feedback": {"": FEEDBACK},
    "layerwise_trust_ratio": {
        "": slamb_jax.layerwise_trust_ratio(EXCHANGE, weight_decay=0.1)
    },
    "elementwise_rescale": {"": slamb_jax.elementwise_rescale(EXCHANGE)},
    "add_decayed_weights": {
        "": links.add_decayed_weights(0.1),
        "schedule": links.add_decayed_weights(RATE, not_vectors),
    },
    "average_gradients": {"": slamb_jax.average_gradients(EXCHANGE)},
    "average_parameters_every": {
        "": slamb_jax.average_parameters_every(EXCHANGE),
        "codes": slamb_jax.average_parameters_every(CODED),
        "outer": slamb_jax.average_parameters_every(LOCAL),
        "rolling": slamb_jax.average_parameters_every(ROLLING),
    },
    "accumulate": {"": slamb_jax.accumulate(slamb(), 2)},
    "skip_not_finite": {"": slamb_jax.skip_not_finite(slamb(), EXCHANGE)},
    "train_in_bfloat16": {
        rounding: slamb_jax.train_in_bfloat16(slamb(), rounding)
        for rounding in ("master", "stochastic")
    },
    "on_shards": {"": slamb_jax.on_shards(slamb(), EXCHANGE)},
    "jointspar": {"": jointspar.jointspar(0.01, slamb_jax.Exchange(), "all", 0.6)},
    "jointspar_lars": {
        "": jointspar.jointspar_lars(
            RATE, slamb_jax.Exchange(), "all", 0.6, weight_decay=0.1
        )
    },
}
ALL = {
    f"{function} {variant}".strip(): tx
    for function, variants in TABLE.items()
    for variant, tx in variants.items()
}
TAKES_ANY_PARAMS = {
    "average_momentum",
    "mask_momentum", "randk_compress_with_error_feedback",
    "elementwise_rescale", "average_gradients", "jointspar",
    "directions.adam", "directions.lion", "directions.muon",
}  # fmt: skip
EMITS_FLOAT32 = {
    "average_momentum",
    "mask_momentum", "layerwise_trust_ratio",
    "directions.adam", "directions.lion", "directions.muon",
}  # fmt: skip
KEEPS_THE_DTYPE = {
    "randk_compress_with_error_feedback", "average_gradients",
    "average_parameters_every",
}  # fmt: skip
each = pytest.mark.parametrize("name", ALL)


def public():
    """Names of the public functions that return a transformation."""
    for space in (slamb_jax, links, wrappers, jointspar, directions):
        prefix = "directions." if space is directions else ""
        for name, value in vars(space).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                returned = inspect.signature(value).return_annotation
                # on_workers wants trees with a leading axis: test_on_workers.py
                if "GradientTransformation" in str(returned) and name != "on_workers":
                    yield prefix + name


def test_no_function_is_missing_from_the_table():
    assert set(TABLE) == set(public())


def tree(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    new = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(dtype))  # noqa: E731
    return {
        "w": new(5, 7),
        "deep": [new(4, 4, 3), None, (new(1, 1), new(0, 3))],
        "scalar": new(),
        "bias": new(6),
    }


ZERO = jax.tree.map(jnp.zeros_like, tree())


def dtype_of_updates(name, grads, params):
    """Between the links of a chain updates are not rounded."""
    if name.split()[0] in EMITS_FLOAT32:
        return "float32"
    return grads if name.split()[0] in KEEPS_THE_DTYPE else params


def dtypes_of(name):
    both = "float32", "bfloat16"
    return both if name.startswith("train_in_bfloat16") else (*both, "float16")


@functools.cache
def made(name):
    """The transformation and its update, compiled once for this file."""
    return ALL[name], jax.jit(ALL[name].update)


@each
def test_types_are_kept(name):
    """So step two does not recompile; unknown extra arguments are accepted."""
    tx = ALL[name]
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    update = functools.partial(tx.update, loss=1.0, anything=None)
    both = [(dtype, dtype) for dtype in dtypes_of(name)]
    for grads, params in [*both, ("bfloat16", "float32"), ("float32", "bfloat16")]:
        like = {
            d: jax.eval_shape(functools.partial(tree, d))
            for d in ("float32", grads, params)
        }
        state = jax.eval_shape(tx.init, like[params])
        updates, after = jax.eval_shape(update, like[grads], state, like[params])
        assert after == state
        assert updates == like[dtype_of_updates(name, grads, params)]


@each
def test_it_runs(name):
    """Without a second compilation, without NaN where all is zero."""
    tx, update = made(name)
    params = tree()
    state = tx.init(params)
    for t in range(1, 4):
        updates, state = update(tree(seed=t), state, params)
        params = optax.apply_updates(params, updates)
    outputs = [update(ZERO, tx.init(p), p) for p in (ZERO, tree())]
    assert update._cache_size() == 1
    for x in jax.tree.leaves((params, state, outputs)):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            assert np.isfinite(np.asarray(x, np.float32)).all()


@each
def test_a_gradient_that_is_none_leaves_its_parameter_alone(name):
    """And the leaves behind it keep their places in the selection."""
    tx, update = made(name)
    params, grads = tree(), tree(seed=1)
    full, _ = update(grads, tx.init(params), params)
    state = tx.init(params)
    updates, after = update(grads | {"bias": None}, state, params)
    assert updates["bias"] is None
    assert jax.tree.structure(after) == jax.tree.structure(state)
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    units = 4096 if "muon" in name else 64
    assert_close(updates, full | {"bias": None}, units=units)


@each
def test_missing_params(name):
    tx = ALL[name]
    state = jax.eval_shape(tx.init, tree())
    update = functools.partial(jax.eval_shape, tx.update, tree(seed=1), state)
    if name.split()[0] in TAKES_ANY_PARAMS:
        update()
        return
    with pytest.raises(ValueError, match="params"):
        update()


@each
def test_init_on_shapes_alone(name):
    tx = ALL[name]
    shapes = jax.eval_shape(tree)
    traced = jax.eval_shape(tx.init, shapes)
    assert traced == jax.eval_shape(tx.init, tree())
    if "train_in_bfloat16" not in name:  # whose state has the values
        state = tx.init(shapes)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
        assert jax.eval_shape(lambda: state) == traced


@each
def test_optax_wrappers_take_it(name):
    params, grads = tree(), tree(seed=1)
    only = {"w": True, "deep": False, "scalar": True, "bias": False}
    labels = {"w": "a", "deep": "b", "scalar": "a", "bias": "b"}
    both = {"a": ALL[name], "b": optax.set_to_zero()}
    for tx in (
        optax.masked(ALL[name], only),
        optax.multi_transform(both, labels),
        optax.MultiSteps(ALL[name], 2),
    ):
        with jax.numpy_dtype_promotion("standard"):  # optax.MultiSteps needs it
            state = jax.eval_shape(tx.init, params)
            updates, after = jax.eval_shape(tx.update, grads, state, params)
        assert updates == jax.eval_shape(lambda: params)
        assert after == state
    tx = ALL[name]
    empty = jax.eval_shape(tx.init, {})
    assert jax.eval_shape(tx.update, {}, empty, {})[0] == {}


@each
def test_tree_map_params(name):
    """optax tells the parts of the state that are like the parameters from counts."""
    tx = ALL[name]
    params = jax.eval_shape(tree)
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
def test_the_state_is_sharded_like_the_parameters(name):
    sharding = NamedSharding(mesh_of(4), P("data"))
    params = {"w": jax.device_put(jnp.ones((8, 64)), sharding)}
    tx = ALL[name]
    state = tx.init(params)
    like = [x for x in jax.tree.leaves(state) if x.shape == (8, 64)]
    assert all(x.sharding == sharding for x in like)


@pytest.mark.parametrize("name", ["slamb", "slamb product", "slamb codes"])
def test_sixteen_bit_parameters_stay_finite(name):
    tx, update = made(name)
    for dtype in ("bfloat16", "float16"):
        params = tree(dtype)
        updates, state = update(tree(dtype, 1), tx.init(params), params)
        for x in jax.tree.leaves((updates, state)):
            assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.parametrize("form", ["sum", "product"])
def test_injected_hyperparameters_give_the_same_numbers(form):
    numbers = {
        "b1": 0.8, "b2": 0.99, "eps": 1e-5, "weight_decay": 0.1,
        "c_min": 0.1, "c_max": 5.0,
    }  # fmt: skip
    make = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
    injected = make(learning_rate=RATE, exchange=EXCHANGE, form=form, **numbers)
    plain = slamb_jax.slamb(0.01, EXCHANGE, form=form, **numbers)
    params = tree()
    state, expected = injected.init(params), plain.init(params)
    assert set(state.hyperparams) == {"learning_rate", *numbers}
    update, want = jax.jit(injected.update), jax.jit(plain.update)
    for t in range(3):
        updates, state = update(tree(seed=t), state, params)
        wanted, expected = want(tree(seed=t), expected, params)
        # 1 - b**t, of a b that was rounded to float32: 6e-8 / (1 - 0.99) off.
        assert_close(updates, wanted, units=512)
    assert update._cache_size() == 1


def test_injected_hyperparameters_in_float32_beside_narrow_parameters():
    make = optax.inject_hyperparams(
        slamb_jax.slamb, static_args="exchange", hyperparam_dtype=jnp.float32
    )
    tx = make(learning_rate=0.01, exchange=EXCHANGE)
    plain, update = made("slamb")
    params, grads = tree("bfloat16"), tree("bfloat16", 1)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    want, _ = update(grads, plain.init(params), params)
    assert_close(updates, want, units=2)
