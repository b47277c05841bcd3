"""The four links, each alone and in chains: what is equal, and what is never lost."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import slamb_jax
from slamb_jax import directions
from slamb_jax.exchange.selections import Strided
from tests.close import assert_close
from tests.optimizers import exchange, random_tree
from tests.replay import masks_at
from tests.workers import AXIS, stack, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "tall": (20, 6)}
ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
CODES = ("uniform8", "uniform4", "ternary", "largest_of_7")
AGREE = slamb_jax.Exchange(AXIS, payload=None)
randk = slamb_jax.randk_compress_with_error_feedback


def gradients(steps, shapes=SHAPES):
    """Of workers whose data differ: each has a mean of its own."""
    own = random_tree(shapes, 1000, N)
    noise = [random_tree(shapes, t, N, scale=0.3) for t in range(steps)]
    return [jax.tree.map(jnp.add, own, x) for x in noise]


def all_alike(tree):
    chex.assert_trees_all_equal(
        tree, jax.tree.map(lambda x: np.stack([x[0]] * N), tree)
    )


def sum_of_means(grads, name):
    return np.sum([np.mean(np.float64(g[name]), 0) for g in grads], 0)


def top_k(x):
    """The largest tenth of a worker's own coordinates, not those of the others."""
    least = jnp.sort(jnp.abs(x).ravel())[-max(1, x.size // 10)]
    sent = jnp.where(jnp.abs(x) >= least, x, jnp.zeros_like(x))
    return lax.pmean(sent, AXIS), x - sent


def low_rank(x):
    """PowerSGD of rank two, from a fixed start; vectors are sent whole."""
    if x.ndim < 2:
        return lax.pmean(x, AXIS), jnp.zeros_like(x)
    start = jax.random.normal(jax.random.key(0), (x.shape[1], 2))
    basis, _ = jnp.linalg.qr(lax.pmean(x @ start, AXIS))
    sent = basis @ (basis.T @ x)
    return lax.pmean(sent, AXIS), x - sent


def of_user(exchanged, *, state=None):
    """A user's compressor, of a function of one array to its mean and what waits."""

    def update(updates, state, params=None):
        del params
        pairs = jax.tree.map(exchanged, updates)
        mean, unsent = jax.tree.transpose(
            jax.tree.structure(updates), jax.tree.structure((0, 0)), pairs
        )
        return slamb_jax.Sent(mean, unsent), state

    return optax.GradientTransformation(lambda params: state and state(params), update)


@pytest.mark.parametrize("exchanged", [top_k, low_rank])
@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_a_compressor_of_the_users_loses_nothing_and_all_workers_agree(exchanged, b1):
    """What was sent and what waits is what came in, and all take the same step."""
    compressor = of_user(exchanged)
    tx = slamb_jax.mask_momentum(
        AGREE, None, b1, None, compressor=compressor, bias_correction=False
    )
    grads = gradients(8)
    sent, state = train(tx, ZEROS, grads, "vmap")[-1]
    all_alike(sent)
    for name, x in sent.items():
        given = sum_of_means(grads, name)
        held = np.float64(state.mu[name]).mean(0) / (1 - b1)
        np.testing.assert_allclose(x[0] + held, given, atol=1e-4, rtol=0)
    adam = slamb_jax.mask_momentum(
        AGREE, directions.adam(), b1, 0.99, compressor=compressor
    )
    params, state = train(adam, ZEROS, grads, "vmap")[-1]
    all_alike((params, state.nu))


@pytest.mark.parametrize("rule", [{}, {"share": 0.5}, {"nesterov": True}])
def test_with_identity_each_worker_has_a_momentum_of_its_own(rule):
    """So does an exchange that sends nothing between averages of the parameters."""
    own = slamb_jax.mask_momentum(AGREE, compressor=optax.identity(), **rule)
    alone = slamb_jax.mask_momentum(slamb_jax.Exchange(payload=None), **rule)
    local = slamb_jax.Exchange(AXIS, payload=None, sync_every=9)
    between = slamb_jax.mask_momentum(local, **rule)
    grads, runs = gradients(4), []
    for tx, axis in ((own, AXIS), (alone, "other"), (between, AXIS)):
        history = train(tx, ZEROS, grads, "vmap", axis)
        runs.append([(p, state.mu, state.nu) for p, state in history])
    chex.assert_trees_all_equal(*runs)


@pytest.mark.parametrize("settings", [{}, {"payload": "uniform8"}, {"overlap": True}])
def test_the_link_itself_may_be_the_compressor(settings):
    """To the bit, with a selection and without, whether or not it keeps a residual."""
    for between in (exchange(**settings), slamb_jax.Exchange(AXIS, **settings)):
        grads, runs = gradients(3), []
        for compressor in (None, randk(between), randk(between, keep_residual=False)):
            tx = slamb_jax.mask_momentum(between, compressor=compressor)
            runs.append(train(tx, ZEROS, grads, "vmap"))
        chex.assert_trees_all_equal(*runs)


def test_a_compressor_may_stand_for_the_selection():
    """One that returns M + e: the worker keeps it, and steps by it."""
    between = exchange()

    def update(updates, state, params=None):
        link = randk(between, keep_residual=False)
        return link.update(updates, state, params)

    init = randk(between, keep_residual=False).init
    runs = []
    for compressor in (None, optax.GradientTransformation(init, update)):
        tx = slamb_jax.mask_momentum(between, compressor=compressor)
        history = train(tx, ZEROS, gradients(4), "vmap")
        runs.append([(p, state.mu, state.nu) for p, state in history])
    assert_close(*runs)


@pytest.mark.parametrize("compressor", [
    of_user(top_k, state=lambda params: {"residual": params}),
    of_user(top_k, state=lambda params: jax.tree.map(jax.lax.complex, params, params)),
    optax.chain(randk(AGREE), optax.identity()),
    optax.ema(0.9),
])  # fmt: skip
def test_a_compressor_with_a_residual_is_refused(compressor):
    tx = slamb_jax.mask_momentum(AGREE, compressor=compressor)
    with pytest.raises(ValueError, match=r"compressor keeps .*Sent\(mean, unsent\)"):
        tx.init(ZEROS)


@pytest.mark.parametrize("payload", [None, "bfloat16", *CODES])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_error_feedback_on_gradients_loses_nothing(payload, selected, dtype):
    between = slamb_jax.Exchange(AXIS, payload=payload)
    if selected:
        between = exchange(payload=payload, compress_ratio=0.25)
    grads = jax.tree.map(lambda x: x.astype(dtype), gradients(8))
    sent = dict.fromkeys(SHAPES, 0.0)
    tx = randk(between)
    state = stack(tx.init(ZEROS), N)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for g in grads:
        updates, state = update(g, state)
        all_alike(updates)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, g)
        sent = {name: sent[name] + np.float64(updates[name][0]) for name in SHAPES}
    # A mean in 16 bits is rounded once more, by 2**-9 of it, and that is not kept.
    narrow = "bfloat16" in (dtype, payload)
    for name, x in sent.items():
        given = sum_of_means(grads, name)
        held = np.float64(state.residual[name]).mean(0)
        room = len(grads) * (2**-7 * 4 if narrow else 2**-20 * 64)
        np.testing.assert_allclose(x + held, given, atol=room, rtol=0)


def test_what_is_not_sent_passes_where_no_residual_is_kept():
    between = exchange(compress_ratio=0.25)
    tx, g = randk(between, keep_residual=False), gradients(1)[0]
    update = jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name=AXIS)
    masks = masks_at(between.selection, [SHAPES[name] for name in sorted(SHAPES)], 1)
    for (name, got), mask in zip(sorted(update(g).items()), masks, strict=True):
        own = np.asarray(g[name])
        assert_close(got, np.where(mask, own.mean(0), own))


@pytest.mark.parametrize("payload", CODES[:2])
@pytest.mark.parametrize("overlap", [False, True])
def test_in_few_bits_the_mean_momentum_is_that_of_dense_adam(payload, overlap):
    """What rounding takes of the selected blocks stays in the momentum."""
    between = exchange(payload=payload, overlap=overlap)
    tx, grads = slamb_jax.slamb(0.01, between), gradients(8)
    dense = dict.fromkeys(SHAPES, 0.0)
    for (_, state), g in zip(train(tx, ZEROS, grads, "vmap"), grads, strict=True):
        for name, mu in state[0].mu.items():
            dense[name] = 0.9 * dense[name] + 0.1 * np.float64(g[name]).mean(0)
            np.testing.assert_allclose(
                np.float64(mu).mean(0), dense[name], atol=2**-18, rtol=0
            )


@pytest.mark.parametrize("b3", [0.0, 0.9, 1.0])
def test_a_stale_coordinate_steps_at_the_rate_of_one_batch(b3):
    selection, steps = Strided(0.25, 0), 3
    tx = slamb_jax.elementwise_rescale(exchange(selection=selection), b3=b3)
    state, ones = stack(tx.init({"w": 0}), N), {"w": jnp.ones((N, 12, 16))}
    age = np.zeros((12, 16), int)
    for t in range(1, steps + 1):
        u, state = jax.vmap(tx.update, axis_name=AXIS)(ones, state)
        age = np.where(masks_at(selection, [(12, 16)], t)[0], 0, age + 1)
        r = np.float64(b3) ** age
        assert_close(u["w"], np.float32(np.stack([r + (1 - r) / np.sqrt(N)] * N)))


def is_count(path):
    return getattr(path[-1], "name", None) == "count"


@pytest.mark.parametrize("make", [slamb_jax.slamb, slamb_jax.lamb, slamb_jax.adamw])
def test_all_counts_are_equal(make):
    """So that each link may compute what is selected from its own."""
    between = slamb_jax.Exchange(AXIS) if make is not slamb_jax.slamb else exchange()
    rate = optax.linear_schedule(0.1, 0.01, 9)
    tx = optax.chain(make(rate, between, weight_decay=rate))
    with jax.numpy_dtype_promotion("standard"):
        _, state = train(tx, ZEROS, gradients(3), "vmap")[-1]
    flat = jax.tree_util.tree_leaves_with_path(state)
    counts = [x for path, x in flat if is_count(path)]
    assert len(counts) >= 2
    for count in counts:
        np.testing.assert_array_equal(count, 3)
