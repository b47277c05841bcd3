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
from tests.close import assert_close, assert_workers_agree
from tests.optimizers import exchange, gradients, slamb
from tests.workers import AXIS, stack, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "tall": (20, 6)}
ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
CODES = ("uniform8", "uniform4", "ternary", "largest_of_7")
AGREE = slamb_jax.Exchange(AXIS, payload=None)
randk = slamb_jax.randk_compress_with_error_feedback


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


@pytest.mark.parametrize("how", [top_k, low_rank, *CODES, "sign"])
@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_what_was_not_sent_is_in_the_momenta_and_all_workers_agree(how, b1):
    """In codes, and by a user's compressor: what was sent and what waits came in."""
    in_codes = isinstance(how, str)
    between = slamb_jax.Exchange(AXIS, payload=how) if in_codes else AGREE
    users = {} if in_codes else {"compressor": of_user(how)}
    plain = users | {"bias_correction": False}
    tx = slamb_jax.mask_momentum(between, None, b1, None, **plain)
    grads = gradients(12, SHAPES, N)
    sent, state = train(tx, ZEROS, grads, "vmap")[-1]
    assert_workers_agree(sent)
    for name, x in sent.items():
        given = sum_of_means(grads, name)
        held = np.float64(state.mu[name]).mean(0) / (1 - b1)
        room = 2.4e-4 * (1 + np.abs(given).max()) / (1 - b1) if in_codes else 1e-4
        np.testing.assert_allclose(x[0] + held, given, atol=room, rtol=0)
    adam = slamb_jax.mask_momentum(between, directions.adam(), b1, 0.99, **users)
    params, state = train(adam, ZEROS, grads, "vmap")[-1]
    assert_workers_agree((params, state.nu))


@pytest.mark.parametrize("rule", [{}, {"share": 0.5}, {"nesterov": True}])
def test_with_identity_each_worker_has_a_momentum_of_its_own(rule):
    """So does an exchange that sends nothing between averages of the parameters."""
    own = slamb_jax.mask_momentum(AGREE, compressor=optax.identity(), **rule)
    alone = slamb_jax.mask_momentum(slamb_jax.Exchange(payload=None), **rule)
    local = slamb_jax.Exchange(AXIS, payload=None, sync_every=9)
    between = slamb_jax.mask_momentum(local, **rule)
    grads, runs = gradients(4, SHAPES, N), []
    for tx, axis in ((own, AXIS), (alone, "other"), (between, AXIS)):
        history = train(tx, ZEROS, grads, "vmap", axis)
        runs.append([(p, state.mu, state.nu) for p, state in history])
    chex.assert_trees_all_equal(*runs)


@pytest.mark.parametrize("settings", [{}, {"payload": "uniform8"}, {"overlap": True}])
def test_the_link_itself_may_be_the_compressor(settings):
    """To the bit, with a selection and without."""
    for between in (exchange(**settings), slamb_jax.Exchange(AXIS, **settings)):
        grads, runs = gradients(3, SHAPES, N), []
        of_exchange = slamb_jax.compressors.of_exchange(between)
        for compressor in (None, randk(between), of_exchange):
            tx = slamb_jax.mask_momentum(between, compressor=compressor)
            runs.append(train(tx, ZEROS, grads, "vmap"))
        chex.assert_trees_all_equal(*runs)


def test_a_compressor_may_stand_for_the_selection():
    """One that returns M + e: the worker keeps it, and steps by it."""
    between, runs = exchange(), []
    ours = slamb_jax.compressors.of_exchange(between)

    def update(updates, state, params=None):
        sent, state = ours.update(updates, state, params)
        return jax.tree.map(jnp.add, *sent), state

    users = optax.GradientTransformation(ours.init, update)
    for compressor in (None, users):
        tx = slamb_jax.mask_momentum(between, compressor=compressor)
        history = train(tx, ZEROS, gradients(4, SHAPES, N), "vmap")
        runs.append([(p, state.mu, state.nu) for p, state in history])
    assert_close(*runs)


@pytest.mark.parametrize("make", [randk, slamb_jax.compressors.of_exchange])
@pytest.mark.parametrize("between", [slamb_jax.Exchange(AXIS), AGREE, exchange()])
def test_the_compressor_that_is_given_is_called(make, between):
    """One that counts its calls and wraps ours gives our bits."""
    ours, calls = make(between), []

    def update(updates, state, params=None, **extra_args):
        calls.append(len(jax.tree.leaves(updates)))
        return ours.update(updates, state, params, **extra_args)

    counting = optax.GradientTransformationExtraArgs(ours.init, update)
    grads, runs = gradients(3, SHAPES, N), []
    for compressor in (None, counting):
        tx = slamb_jax.mask_momentum(between, compressor=compressor)
        runs.append(train(tx, ZEROS, grads, "vmap"))
        assert bool(calls) == (compressor is counting)
    chex.assert_trees_all_equal(*runs)


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
    grads = jax.tree.map(lambda x: x.astype(dtype), gradients(8, SHAPES, N))
    sent = dict.fromkeys(SHAPES, 0.0)
    tx = randk(between)
    state = stack(tx.init(ZEROS), N)
    update = jax.jit(jax.vmap(tx.update, axis_name=AXIS))
    for g in grads:
        updates, state = update(g, state)
        assert_workers_agree(updates)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, g)
        sent = {name: sent[name] + np.float64(updates[name][0]) for name in SHAPES}
    for name, x in sent.items():
        given = sum_of_means(grads, name)
        held = np.float64(state.residual[name]).mean(0)
        room = len(grads) * 2**-20 * 64
        np.testing.assert_allclose(x + held, given, atol=room, rtol=0)


@pytest.mark.parametrize(
    ("settings", "room"),
    [({"payload": x}, 2**-18) for x in CODES[:2]] + [({"mu_dtype": "bfloat16"}, 2**-4)],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_the_mean_momentum_is_that_of_dense_adam(settings, room, overlap):
    """Exchanged or not, late or not, what rounding takes stays in the momentum."""
    tx, grads = slamb(**settings, overlap=overlap), gradients(8, SHAPES, N)
    dense = dict.fromkeys(SHAPES, 0.0)
    for (_, state), g in zip(train(tx, ZEROS, grads, "vmap"), grads, strict=True):
        for name, mu in state[0].mu.items():
            dense[name] = 0.9 * dense[name] + 0.1 * np.float64(g[name]).mean(0)
            mean = mu.astype(np.float64).mean(0)
            np.testing.assert_allclose(mean, dense[name], atol=room, rtol=0)


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
def test_where_others_alone_have_a_gradient_a_small_eps_is_told(eps):
    """Their mean over the root of a v of one's own, which is 0."""
    tx = slamb_jax.mask_momentum(exchange(), directions.adam(eps), 0.9, 0.999)
    # At the step at which they are exchanged.
    grads = jax.tree.map(lambda x: jnp.ones((N, *x.shape)).at[0].set(0.0), ZEROS)
    run = lambda: train(tx, ZEROS, [grads], "vmap")[-1][0]["b"]  # noqa: E731
    if eps < 1e-6:
        with pytest.warns(UserWarning, match="the step is M / eps: give eps=1e-06 or"):
            assert run()[0].min() > 1e6
    else:
        assert run()[0].max() < 1e6
