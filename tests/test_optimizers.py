"""Each optimizer: dense training's twin, its numbers, its memory; directions."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import slamb_jax
from slamb_jax import directions
from tests.close import assert_close
from tests.compiled import compile_optimized
from tests.optimizers import plain, random_tree, standard_promotion
from tests.workers import AXIS, MAPPINGS, train

SHAPES = {"w": (12, 16), "b": (16,), "tall": (20, 4), "conv": (2, 3, 4, 5), "scale": ()}
RATE = optax.linear_schedule(0.1, 0.01, 6)


def by_dimensions(params):
    return jax.tree.map(lambda p: "muon" if p.ndim == 2 else "adam", params)


DECAY: Any = {
    "weight_decay": 0.1,
    "mask": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
}


def adam_of_momentum(b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, nesterov=False):
    """Adam whose second moment is that of the momentum, which optax does not have."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.float32(0), zeros, zeros

    def update(g, state, params=None):
        t, m, v = state[0] + 1, state[1], state[2]
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, g)
        hat = jax.tree.map(lambda m: m / (1 - b1**t), m)
        if nesterov:
            ahead, now = b1 / (1 - b1 ** (t + 1)), (1 - b1) / (1 - b1**t)
            hat = jax.tree.map(lambda m, g: ahead * m + now * g, m, g)
        v = jax.tree.map(lambda v, h: b2 * v + (1 - b2) * h**2, v, hat)
        u = jax.tree.map(
            lambda h, v: h / (jnp.sqrt(v / (1 - b2**t) + eps_root) + eps), hat, v
        )
        return u, (t, m, v)

    return optax.GradientTransformation(init, update)


def trust_ratio(form, decay, c_min=0.01, c_max=1000.0):
    """LAMB's ratio of each leaf, in the two forms."""

    def one(u, p):
        decayed = u + decay * p
        norm = jnp.linalg.norm(decayed if form == "product" else u)
        ratio = jnp.linalg.norm(p) / norm
        if form == "sum" or p.ndim > 1:
            ratio = jnp.clip(ratio, c_min, c_max)
        return ratio * decayed

    return optax.stateless(lambda u, p: jax.tree.map(one, u, p))


def chain_of(*links, rate=RATE):
    return optax.chain(*links, optax.scale_by_learning_rate(rate))


def muon_of(rate=RATE, adam=1.0, decays=(0.0, 0.0), nesterov=True, **settings):
    """optax's for matrices, and for other leaves Adam of the momentum."""
    other = adam_of_momentum(nesterov=nesterov), optax.add_decayed_weights(decays[1])
    muon = contrib.muon(rate, weight_decay=decays[0], nesterov=nesterov, **settings)
    both = {"muon": muon, "adam": chain_of(*other, rate=rate)}
    return optax.partition(both, by_dimensions)


DENSE = {  # ours of an exchange, and what it is in dense training
    "adamw": (
        lambda e: slamb_jax.adamw(RATE, e, eps_root=1e-6, **DECAY),
        chain_of(adam_of_momentum(eps_root=1e-6), optax.add_decayed_weights(**DECAY)),
    ),
    "adamw, nesterov": (
        lambda e: slamb_jax.adamw(
            0.1, e, b1=0.8, b2=0.95, nesterov=True, weight_decay=0.0
        ),
        chain_of(adam_of_momentum(0.8, 0.95, nesterov=True), rate=0.1),
    ),
    "slamb": (
        lambda e: slamb_jax.slamb(RATE, e, weight_decay=0.1),
        chain_of(adam_of_momentum(eps=1e-6), trust_ratio("sum", 0.1)),
    ),
    "slamb, product": (
        lambda e: slamb_jax.slamb(RATE, e, form="product", weight_decay=0.1, c_max=2.0),
        chain_of(adam_of_momentum(eps=1e-6), trust_ratio("product", 0.1, c_max=2.0)),
    ),
    "lion": (
        lambda e: slamb_jax.lion(RATE, e, **DECAY),
        optax.lion(RATE, **DECAY),
    ),
    "sgd": (lambda e: slamb_jax.sgd(0.1, e), optax.sgd(0.1)),
    "sgd, momentum": (
        lambda e: slamb_jax.sgd(RATE, e, momentum=0.9),
        optax.sgd(RATE, 0.9),
    ),
    "sgd, nesterov": (
        lambda e: slamb_jax.sgd(0.1, e, momentum=0.9, nesterov=True),
        optax.sgd(0.1, 0.9, nesterov=True),
    ),
    "muon": (
        lambda e: slamb_jax.muon(RATE, e, weight_decay=0.1, adam_weight_decay=0.2),
        muon_of(decays=(0.1, 0.2)),
    ),
    "muon, plain": (
        lambda e: slamb_jax.muon(0.1, e, beta=0.9, nesterov=False, ns_steps=3),
        muon_of(0.1, beta=0.9, nesterov=False, ns_steps=3),
    ),
}


@pytest.mark.parametrize(
    ("name", "n", "axis_name", "mapping"),
    [(name, *x) for name in DENSE for x in ((1, None, "vmap"), (3, AXIS, "vmap"))]
    + [(name, 1, AXIS, "vmap") for name in ("adamw", "sgd, momentum", "muon")]
    + [("adamw", 8, AXIS, mapping) for mapping in MAPPINGS[1:]]
    + [(name, 8, AXIS, "shard_map") for name in ("slamb", "lion", "muon")],
)
def test_in_float32_it_is_the_dense_optimizer_whatever_data_a_worker_has(
    name, n, axis_name, mapping
):
    make, dense = DENSE[name]
    own = random_tree(SHAPES, 1000, n)  # each worker's data have a mean of their own
    grads = [
        jax.tree.map(jnp.add, own, random_tree(SHAPES, t, n, scale=0.3))
        for t in range(5)
    ]
    means = [jax.tree.map(lambda g: g.mean(0, keepdims=True), g) for g in grads]
    params = random_tree(SHAPES, 99)
    exchange = slamb_jax.Exchange(axis_name, payload=None)
    with standard_promotion():
        got = train(make(exchange), params, grads, mapping)
        want = train(dense, params, means, "vmap")
    # The references round 1 - 0.999**t, which is 6e-5 off at t = 1, of a step of 1/10;
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    units = 4096 if "muon" in name else 512
    for (p, _), (q, _) in zip(got, want, strict=True):
        assert_close(p, jax.tree.map(lambda x: np.concatenate([x] * n), q), units=units)


@pytest.mark.parametrize("name", DENSE)
def test_an_update_of_16_bits_is_that_of_32_rounded_once(name):
    tx = DENSE[name][0](slamb_jax.Exchange())
    narrow = [
        jax.tree.map(lambda x: x.astype("bfloat16"), random_tree(SHAPES, t))
        for t in (1, 2)
    ]
    wide = jax.tree.map(lambda x: x.astype("float32"), narrow)
    with standard_promotion():
        updates = [
            jax.jit(tx.update)(g, tx.init(wide[1]), p)[0] for g, p in (narrow, wide)
        ]
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), updates[1])
    assert {x.dtype.name for x in jax.tree.leaves(updates[0])} == {"bfloat16"}
    assert_close(updates[0], rounded, units=2)


@pytest.mark.parametrize("payload", ["uniform8", "uniform4", "ternary"])
def test_muon_orthogonalizes_the_mean_unless_its_codes_are_coarse(payload):
    """Of workers whose own momenta are orthogonal to each other."""
    tx = slamb_jax.muon(
        1.0, slamb_jax.Exchange(AXIS, payload=payload), beta=0.0, nesterov=False
    )
    own = np.zeros((2, 8, 8), np.float32)
    own[0, :4, :4], own[1, 4:, 4:] = np.eye(4), 0.5 * np.eye(4)
    params, _ = train(tx, {"w": np.zeros((8, 8), np.float32)}, [{"w": own}], "vmap")[-1]
    size = np.linalg.norm(np.asarray(params["w"])[0])
    # Each own direction has four singular values of about 1, the mean of both half.
    assert (size > 2) == (payload == "uniform8")


@pytest.mark.parametrize("payload", ["ternary", "largest_of_7"])
def test_muon_in_coarse_codes_finds_a_minimum_of_the_same_data(payload):
    target = random_tree({"w": (16, 24), "b": (24,)}, 0)
    rate = optax.linear_schedule(0.1, 0.0, 300)
    tx = slamb_jax.muon(rate, slamb_jax.Exchange(AXIS, payload=payload))

    def run(noise):
        def step(carry, _):
            params, state = carry
            g = jax.tree.map(lambda p, t: p - t + 0 * noise, params, target)
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jax.tree.map(lambda t: jnp.zeros_like(t) + 0 * noise, target)
        return jax.lax.scan(step, (params, tx.init(params)), length=300)[0][0]

    with standard_promotion():
        params = jax.jit(jax.vmap(run, axis_name=AXIS))(jnp.zeros(4))
    for name, x in target.items():
        assert np.linalg.norm(params[name][0] - x) < 0.03 * np.linalg.norm(x)


@pytest.mark.parametrize(
    "direction", [optax.scale_by_sign(), optax.scale_by_rms(), directions.muon()]
)
def test_a_direction_may_also_be_the_next_link(direction):
    exchange = slamb_jax.Exchange(AXIS)
    inside = slamb_jax.average_momentum(exchange, direction, 0.8)
    after = optax.chain(slamb_jax.average_momentum(exchange, b1=0.8), direction)
    grads = [random_tree(SHAPES, t, 3) for t in range(3)]
    with jax.numpy_dtype_promotion("standard"):
        runs = [
            train(tx, random_tree(SHAPES, 9), grads, "vmap") for tx in (inside, after)
        ]
    assert_close(*([p for p, _ in run] for run in runs), units=4096)


def test_a_constant_gradient_steps_by_the_rate():
    """From the first step on, so that nobody needs a warm-up for it."""
    tx = slamb_jax.adamw(0.5, slamb_jax.Exchange(), weight_decay=0.0)
    g = {"w": jnp.array([1e-3, -2.0, 30.0])}
    state = tx.init(g)
    for _ in range(5):
        u, state = jax.jit(tx.update)(g, state, g)
        np.testing.assert_allclose(u["w"], [-0.5, 0.5, -0.5], rtol=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_codes_round_to_nothing_does_not_step_far(nesterov):
    """v of the momentum holds the step where m is coded as 0, and the gradient not."""
    exchange = slamb_jax.Exchange(AXIS, payload="uniform4")
    tx = slamb_jax.adamw(1.0, exchange, b2=0.99, weight_decay=0.0, nesterov=nesterov)
    scales = jnp.logspace(0, -6, 200)
    grads = [
        {"b": scales[None] * random_tree({"b": (200,)}, t, 4)["b"]} for t in range(6)
    ]
    ahead = jnp.zeros((4, 200))
    for p, _ in train(tx, {"b": jnp.zeros(200)}, grads, "vmap"):
        assert jnp.abs(p["b"] - ahead).max() < 1.1 / np.sqrt(1 - 0.99)
        ahead = p["b"]


def test_an_orthogonalized_matrix_is_nearly_orthogonal():
    """For every shape, and for kernels of attention: heads together, or one by one."""
    dims = directions.DimensionNumbers
    split = {"q": dims(0, (1, 2)), "o": dims((0, 1), 2), "heads": dims(0, 2), "b": None}
    shapes = {"q": (24, 4, 6), "o": (4, 6, 40), "heads": (20, 3, 30), "b": (7,)}
    tx = directions.muon(ns_steps=20, weight_dimension_numbers=split)
    m = random_tree(shapes, 3)
    u, _ = tx.update(m, tx.init(m))
    np.testing.assert_array_equal(u["b"], m["b"])
    flat = {
        "q": u["q"].reshape(1, 24, 24),
        "o": u["o"].reshape(1, 24, 40),
        "heads": u["heads"].transpose(1, 0, 2),
    }
    for x in flat.values():
        scale = max(1, x.shape[2] / x.shape[1]) ** 0.5
        values = np.linalg.svd(np.asarray(x) / scale, compute_uv=False)
        assert ((values > 0.5) & (values < 1.5)).all()  # where the quintic oscillates


def test_optax_dimension_numbers_serve():
    if not hasattr(contrib, "MuonDimensionNumbers"):
        pytest.skip("optax 0.2.5 has none")
    shapes = {"w": (12, 16), "conv": (2, 3, 4, 5)}
    dims = {
        "w": contrib.MuonDimensionNumbers(),
        "conv": contrib.MuonDimensionNumbers((0, 1, 2), 3),
    }
    ours = slamb_jax.muon(0.1, slamb_jax.Exchange(), muon_weight_dimension_numbers=dims)
    theirs = contrib.muon(0.1, muon_weight_dimension_numbers=dims)
    grads, params = (
        [random_tree(shapes, t, 1) for t in range(3)],
        random_tree(shapes, 9),
    )
    with standard_promotion():
        runs = [train(tx, params, grads, "vmap") for tx in (ours, theirs)]
    assert_close(*([p for p, _ in run] for run in runs), units=4096)


def test_a_direction_of_a_second_moment_needs_it():
    tx = slamb_jax.average_momentum(slamb_jax.Exchange(), directions.adam(), b2=None)
    with pytest.raises(ValueError, match="second_moment"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))


@pytest.mark.parametrize("form", ["sum", "product"])
def test_each_layer_of_a_stack_has_its_own_trust_ratio(form):
    stacked = {"stack": True, "w": False}
    shapes = {"stack": (3, 16, 40), "w": (5, 7)}
    p, u = random_tree(shapes, 0), random_tree(shapes, 1)
    p["stack"] = p["stack"] * jnp.array([1.0, 10.0, 100.0])[:, None, None]
    tx = slamb_jax.layerwise_trust_ratio(
        slamb_jax.Exchange(stacked=stacked), form=form, weight_decay=0.1, c_max=20.0
    )
    got, _ = jax.jit(tx.update)(u, tx.init(p), p)
    one = trust_ratio(form, 0.1, c_max=20.0).update
    want, _ = one([*u["stack"], u["w"]], optax.EmptyState(), [*p["stack"], p["w"]])
    assert_close([*got["stack"], got["w"]], want)


def test_schedules_count_steps_from_zero():
    rate, params = optax.piecewise_constant_schedule(1.0, {1: 0.0}), jnp.ones((3, 2))
    for exchange in (plain(), slamb_jax.Exchange()):
        tx = slamb_jax.slamb(rate, exchange, weight_decay=rate, form="product")
        state = tx.init(params)
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
            update = jax.jit(tx.update)
            first, state = update(params, state, params)
            second, _ = update(params, state, params)
        assert jnp.all(first != 0)
        assert jnp.all(second == 0)


def test_the_largest_count_is_not_the_last():
    """Else the same coordinates would be exchanged for ever."""
    params, outer = {"w": jnp.ones((4, 6))}, optax.sgd(0.5)
    for tx in (
        slamb_jax.slamb(0.1, plain(compress_ratio=0.5, min_size=0, sync_every=3)),
        slamb_jax.adamw(0.1, slamb_jax.Exchange(sync_every=3, outer=outer)),
        slamb_jax.train_in_bfloat16(slamb_jax.sgd(0.1, slamb_jax.Exchange())),
    ):
        state, ours = tx.init(params), []
        of_steps = jax.tree.map(
            lambda x: x if x.ndim or x.dtype != jnp.int32 else x + (2**31 - 2), state
        )
        for _ in range(3):
            with standard_promotion():
                updates, of_steps = tx.update(params, of_steps, params)
            assert jnp.isfinite(updates["w"]).all()
            ours.append(
                [int(x) for x in jax.tree.leaves(of_steps) if x.dtype == jnp.int32]
            )
        assert ours[0]
        assert set(ours[0]) == {2**31 - 1}
        assert set(ours[1]) <= {2**30, 2**31 - 1}  # optax's schedules stand still
        assert (2**30 + 1) in ours[2]


def copies(tree, params):
    """The bytes of a tree, in copies of the parameters; all but a few numbers."""
    sizes = [
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(y))
        for y in (tree, params)
    ]
    return round(sizes[0] / sizes[1], 2)


@pytest.mark.parametrize(
    ("settings", "moments", "want"),
    [
        ({}, {}, 2),
        ({}, {"mu_dtype": "bfloat16"}, 1.5),
        ({}, {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}, 1),
        ({"payload": None}, {}, 2),
        ({"payload": None, "sync_every": 9}, {}, 2),
        ({"sync_every": 9, "outer": optax.sgd(1.0)}, {}, 3),  # the last average
        ({"sync_every": 9, "outer": optax.sgd(1.0, 0.9)}, {}, 4),
    ],
)
def test_the_state_is_two_moments_and_what_an_outer_optimizer_keeps(
    settings, moments, want
):
    params = {"a": jnp.zeros((300, 70)), "b": jnp.zeros((70,))}
    for make in (slamb_jax.adamw, slamb_jax.slamb):
        tx = make(0.1, slamb_jax.Exchange(AXIS, **settings), **moments)
        assert copies(jax.eval_shape(tx.init, params), params) == want
    if not settings:
        tx = slamb_jax.slamb(0.1, slamb_jax.Exchange.paper(AXIS), **moments)
        assert copies(jax.eval_shape(tx.init, params), params) == want


def temporaries(shape, tx, whole_step=False):
    """Of a step of a single worker, in copies of the parameters."""
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = jax.eval_shape(tx.init, params)
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    program = compile_optimized(update.lower(params, state, params))
    return program.memory_analysis().temp_size_in_bytes / (4 * math.prod(shape))


def test_keeps_no_direction_in_memory():
    """Beside the payload, the step holds no copy of a leaf (donated buffers)."""
    params = {str(i): jnp.zeros((1024, 1024)) for i in range(4)}
    tx = slamb_jax.slamb(0.01, plain())

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    compiled = compile_optimized(step.lower((params, tx.init(params)), params))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    leaves = 1.4 if jax.__version_info__ >= (0, 10) else 8.4
    assert temporary < leaves * params["0"].nbytes


@pytest.mark.parametrize("columns", [2001, 2048])
def test_a_leaf_with_an_odd_last_dimension_needs_no_more_memory(columns):
    """Its blocks are elements, of which no age, rate or square is kept in memory."""
    tx = slamb_jax.slamb(0.1, slamb_jax.Exchange.paper())
    assert temporaries((500, columns), tx) < 1


@pytest.mark.parametrize(
    ("name", "single"),
    [(name, slamb_jax.Exchange()) for name in ("adamw", "lion", "sgd", "slamb")]
    + [("slamb", slamb_jax.Exchange.paper(overlap=late)) for late in (False, True)],
)
def test_a_step_that_may_be_skipped_needs_no_more_memory(name, single):
    """The new state takes the place of the old one."""
    rest = {"momentum": 0.9} if name == "sgd" else {}
    tx = getattr(slamb_jax, name)(0.1, single, **rest)
    more = slamb_jax.skip_not_finite(tx, single)
    # An old jax keeps the gradient, or its squares; a conditional took 3 copies.
    room = 0.1 if jax.__version_info__ >= (0, 10) else 2.1
    shape = (500, 2048)
    assert temporaries(shape, more) < temporaries(shape, tx) + room
