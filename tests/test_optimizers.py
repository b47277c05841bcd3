"""Each optimizer: dense training's twin, its numbers, its memory; directions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import slamb_jax
from slamb_jax import directions
from tests.close import assert_close
from tests.optimizers import gradients, plain, random_tree, standard_promotion
from tests.workers import AXIS, MAPPINGS, stack, train

SHAPES = {"w": (12, 16), "b": (16,), "tall": (20, 4), "conv": (2, 3, 4, 5), "scale": ()}
RATE = optax.linear_schedule(0.1, 0.01, 6)
DECAY = {
    "weight_decay": 0.1,
    "mask": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
}
LAMB = {"form": "product", "weight_decay": 0.1, "c_min": 0, "c_max": math.inf}


def muon_of(rate, decays=(0.0, 0.0), nesterov=True, **settings):
    """optax's for matrices, and for other leaves our AdamW of a single worker."""
    muon = contrib.muon(rate, weight_decay=decays[0], nesterov=nesterov, **settings)
    alone = slamb_jax.Exchange()
    adam = slamb_jax.adamw(rate, alone, weight_decay=decays[1], nesterov=nesterov)
    kinds = {x: "muon" if len(s) == 2 else "adam" for x, s in SHAPES.items()}
    return optax.partition({"muon": muon, "adam": adam}, kinds)


NESTEROV = {"b1": 0.8, "eps_root": 1e-6, "nesterov": True}
MUON = {"weight_decay": 0.1, "adam_weight_decay": 0.2}
PLAIN = {"beta": 0.9, "nesterov": False, "ns_steps": 3}
DENSE = {  # ours, and what it is in dense training; None: ours of a single worker
    "adamw": ("adamw", RATE, {"eps": 1e-20, "eps_root": 0.1, **DECAY}, None),
    "adamw, nesterov": ("adamw", 0.1, NESTEROV, None),
    "lamb": ("lamb", RATE, {"weight_decay": 0.1}, None),
    "lamb, product": ("lamb", RATE, {"eps": 0.1, **LAMB}, None),
    "lion": ("lion", RATE, DECAY, optax.lion(RATE, **DECAY)),
    "sgd": ("sgd", 0.1, {}, optax.sgd(0.1)),
    "sgd, momentum": ("sgd", RATE, {"momentum": 0.9}, optax.sgd(RATE, 0.9)),
    "sgd, nesterov": (
        "sgd", 0.1, {"momentum": 0.9, "nesterov": True}, optax.sgd(0.1, 0.9, True)
    ),
    "muon": ("muon", RATE, MUON, muon_of(RATE, decays=(0.1, 0.2))),
    "muon, plain": ("muon", 0.1, PLAIN, muon_of(0.1, **PLAIN)),
}  # fmt: skip


def ours(name, exchange):
    kind, rate, settings, _ = DENSE[name]
    return getattr(slamb_jax, kind)(rate, exchange, **settings)


@pytest.mark.parametrize(
    ("name", "n", "axis_name", "mapping"),
    [(name, 3, AXIS, "vmap") for name in DENSE]
    + [(name, 1, None, "vmap") for name in ("lion", "sgd, nesterov", "muon")]
    + [("adamw", 8, AXIS, mapping) for mapping in MAPPINGS[1:]],
)
def test_in_float32_it_is_the_dense_optimizer_whatever_data_a_worker_has(
    name, n, axis_name, mapping
):
    grads = gradients(5, SHAPES, n)
    means = [jax.tree.map(lambda g: g.mean(0, keepdims=True), g) for g in grads]
    exchange = slamb_jax.Exchange(axis_name, payload=None)
    with standard_promotion():
        got = train(ours(name, exchange), random_tree(SHAPES, 99), grads, mapping)
        dense = DENSE[name][-1] or ours(name, slamb_jax.Exchange())
        want = train(dense, random_tree(SHAPES, 99), means, "vmap")
    # optax rounds 1 - 0.999**t, which is 6e-5 off at t = 1, of a step of 1/10;
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    units = 4096 if "muon" in name else 512
    for (p, state), (q, alone) in zip(got, want, strict=True):
        assert_close(p, jax.tree.map(lambda x: np.concatenate([x] * n), q), units)
        if DENSE[name][-1] is None:  # so that one copy of it may go on densely
            assert_close(*map(slamb_jax.consolidate, (state, alone)), units)


def to_optax(state, params, tx, times, b1=0.9):
    """As the guide converts a state of one copy; ``times``: of v."""
    old = optax.tree.get(state, "MaskMomentumState")
    assert (old.nu["w"] == 0).any()  # of what was not sent yet

    def dense_nu(v, mean):
        return times * (jnp.sqrt(v) + 0.05 * jnp.sqrt(mean)) ** 2

    mu = jax.tree.map(lambda m: m / b1, old.mu)
    nu = jax.tree.map(dense_nu, old.nu, old.nu_mean)
    return optax.tree.set(tx.init(params), count=old.count, mu=mu, nu=nu)


def from_optax(state, params, tx, times, b1=0.9):
    old = optax.tree.get(state, "ScaleByAdamState")
    mu = jax.tree.map(lambda m: b1 * m, old.mu)
    nu = jax.tree.map(lambda v: times * v, old.nu)
    new = {"mu": mu, "nu": nu, "nu_mean": jax.tree.map(jnp.mean, nu)}
    return optax.tree.set(tx.init(params), count=old.count, **new)


def noisy(tx):
    """50 steps of 8 workers on a noisy quadratic: their mean loss, the longest step."""
    target = random_tree({"w": (12, 16)}, 0)["w"]
    curved = np.logspace(0, -2, 12, dtype=np.float32)[:, None]
    curved[-1] = 1e-12  # too flat to be sent in codes beside the others

    def step(carry, key):
        params, state = carry
        own = jax.random.fold_in(key, jax.lax.axis_index(AXIS))
        noise = 0.5 * np.sqrt(curved) * jax.random.normal(own, target.shape)
        grads = {"w": curved * (params["w"] - target) + noise}
        updates, state = tx.update(grads, state, params)
        loss = jnp.mean(curved * jnp.square(params["w"] - target))
        length = jnp.abs(updates["w"]).max()
        return (optax.apply_updates(params, updates), state), (loss, length)

    def run(carry, seed):
        keys = jax.random.split(jax.random.key(seed), 50)
        carry, (losses, lengths) = jax.lax.scan(step, carry, keys)
        return carry, losses.mean(), lengths.max()

    return jax.jit(jax.vmap(run, (0, None), axis_name=AXIS))


def test_the_loss_does_not_jump_where_a_run_goes_on_under_optax_or_back():
    """At twice the rate, as the guide has it; v as it is, or of noise alone, jumps.

    No step is long: not of what has a momentum and no v yet, by which Adam divides.
    """
    between = slamb_jax.adamw(0.005, slamb_jax.Exchange(AXIS), weight_decay=0.0)
    dense, params = optax.adamw(0.01, weight_decay=0.0), {"w": jnp.zeros((12, 16))}
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, AXIS))
    alone = optax.chain(mean, dense)
    with standard_promotion():
        ours, theirs = noisy(between), noisy(alone)
        for run, start, other, tx, convert, times in (
            (ours, between, theirs, alone, to_optax, (19, 1)),
            (theirs, alone, ours, between, from_optax, (1 / 4, 1 / 19)),
        ):
            carry = stack((params, start.init(params)), 8)
            for seed in range(40):
                carry, *_ = run(carry, seed)
            one, state = slamb_jax.consolidate(carry)
            ends = [stack((one, convert(state, one, tx, x)), 8) for x in times]
            (_, loss, length), (_, jumps, _) = (other(end, 40) for end in ends)
            _, on, _ = run(carry, 40)  # goes on, on the same noise
            assert loss[0] < 1.2 * on[0] < jumps[0]
            assert length[0] < 5 * 0.01  # without the floor 120 rates


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, "bfloat16") for name in ("adamw, nesterov", "lamb, product", "slamb")]
    + [(name, "bfloat16") for name in ("lion", "sgd, momentum", "muon")]
    + [(name, "float16") for name in ("adamw", "lamb", "slamb")],
)
def test_an_update_of_16_bits_is_that_of_32_rounded_once(name, dtype):
    tx, trees = slamb_jax.slamb(0.1, plain(min_size=20)), []
    if name in DENSE:
        tx = ours(name, slamb_jax.Exchange())
    narrow = optax.tree.cast([random_tree(SHAPES, t) for t in (1, 2)], dtype)
    for g, p in (narrow, optax.tree.cast(narrow, "float32")):
        with standard_promotion():
            trees.append(jax.jit(tx.update)(g, tx.init(p), p)[0])
    got, want = trees
    assert {x.dtype.name for x in jax.tree.leaves(got)} == {dtype}
    assert_close(got, jax.tree.map(lambda x: x.astype(dtype), want), units=2)


def test_an_orthogonalized_matrix_is_nearly_orthogonal():
    """For every shape, and for kernels of attention: heads together, or one by one."""
    dims = contrib.MuonDimensionNumbers
    split = {"q": dims(0, (1, 2)), "o": dims((0, 1), 2), "heads": dims(0, 2), "b": None}
    shapes = {"q": (24, 4, 6), "o": (4, 6, 40), "heads": (20, 3, 30), "b": (7,)}
    tx = directions.muon(ns_steps=20, weight_dimension_numbers=split)
    m = random_tree(shapes, 3)
    u, _ = tx.update(m, tx.init(m))
    np.testing.assert_array_equal(u["b"], m["b"])
    q, o = (u[name].reshape(1, 24, -1) for name in "qo")
    for x in (q, o, u["heads"].transpose(1, 0, 2)):
        scale = max(1, x.shape[2] / x.shape[1]) ** 0.5
        values = np.linalg.svd(np.asarray(x) / scale, compute_uv=False)
        assert ((values > 0.5) & (values < 1.5)).all()  # where the quintic oscillates


def test_the_largest_count_is_not_the_last():
    """Else the same coordinates would be exchanged for ever."""
    params, outer = {"w": jnp.ones((4, 6))}, optax.sgd(0.5)
    for tx in (
        slamb_jax.slamb(0.1, plain(compress_ratio=0.5, min_size=0, sync_every=3)),
        slamb_jax.adamw(0.1, slamb_jax.Exchange(sync_every=3, outer=outer)),
    ):
        counts = []
        state = jax.tree.map(
            lambda x: x + (2**31 - 2) if x.dtype == jnp.int32 else x, tx.init(params)
        )
        for _ in range(3):
            with standard_promotion():
                updates, state = tx.update(params, state, params)
            assert jnp.isfinite(updates["w"]).all()
            leaves = jax.tree.leaves(state)
            counts.append({int(x) for x in leaves if x.dtype == jnp.int32})
        assert counts[0] == {2**31 - 1}
        assert counts[1] <= {2**30, 2**31 - 1}  # optax's schedules stand still
        assert (2**30 + 1) in counts[2]


OUTER = {"sync_every": 9, "outer": optax.sgd(1.0, 0.9)}
PAPER = slamb_jax.Exchange.paper
BETWEEN, NARROW = slamb_jax.Exchange(AXIS), {"mu_dtype": "bfloat16"}
LOCAL = slamb_jax.Exchange(AXIS, payload=None, sync_every=9)
STATES = [  # of float32 parameters, and the bytes of each
    (slamb_jax.lamb(0.1, BETWEEN), 8),
    (slamb_jax.lamb(0.1, BETWEEN, **NARROW), 6),
    (slamb_jax.slamb(0.1, PAPER(AXIS)), 8),
    (slamb_jax.slamb(0.1, PAPER(AXIS), **NARROW), 6),
    (slamb_jax.lamb(0.1, LOCAL), 8),
    (slamb_jax.lamb(0.1, slamb_jax.Exchange(AXIS, **OUTER)), 16),  # last average, trace
]


@pytest.mark.parametrize(("tx", "nbytes"), STATES)
def test_the_state_is_two_moments_and_what_is_added_to_them(tx, nbytes):
    params = {"a": jnp.zeros((300, 70)), "b": jnp.zeros((70,))}
    leaves = jax.tree.leaves(jax.eval_shape(tx.init, params))
    held = sum(x.size * x.dtype.itemsize for x in leaves)
    assert held / (300 * 70 + 70) == pytest.approx(nbytes, rel=0.01)


def temporaries(shape, tx, leaves=1):
    """Of a step of a single worker with donated buffers, in copies of a leaf."""
    params = {str(i): jax.ShapeDtypeStruct(shape, jnp.float32) for i in range(leaves)}
    state = jax.eval_shape(tx.init, params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params)
    memory = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes / (4 * math.prod(shape))


@pytest.mark.parametrize(
    ("single", "shape", "leaves", "least"),
    [
        (plain(), (1024, 1024), 4, 1.4),
        (PAPER(), (500, 2048), 1, 1.0),
        (PAPER(), (500, 2001), 1, 1.0),  # whose blocks are elements
    ],
)
def test_keeps_no_direction_age_or_square_in_memory(single, shape, leaves, least):
    """Beside the payload, the step holds no copy of a leaf."""
    if jax.__version_info__ < (0, 10):
        least += 7
    assert temporaries(shape, slamb_jax.slamb(0.01, single), leaves) < least


@pytest.mark.parametrize(
    ("name", "single"),
    [(name, slamb_jax.Exchange()) for name in ("adamw", "lion", "sgd", "lamb")]
    + [("slamb", PAPER())],
)
def test_a_step_that_may_be_skipped_needs_no_more_memory(name, single):
    """The new state takes the place of the old one."""
    rest = {"momentum": 0.9} if name == "sgd" else {}
    tx, shape = getattr(slamb_jax, name)(0.1, single, **rest), (500, 2048)
    more = slamb_jax.skip_not_finite(tx, single)
    # An old jax keeps the gradient, or its squares; a conditional took 3 copies.
    room = 0.1 if jax.__version_info__ >= (0, 10) else 2.1
    assert temporaries(shape, more) < temporaries(shape, tx) + room
