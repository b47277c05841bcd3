"""The average of parameters: of local steps, in codes, by an outer optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.close import assert_close
from tests.optimizers import descend, random_tree, standard_promotion
from tests.workers import AXIS, over_workers, stack

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def every(steps, payload=None, compressor=None, **settings):
    exchange = slamb_jax.Exchange(AXIS, payload=payload, sync_every=steps, **settings)
    return slamb_jax.average_parameters_every(exchange, compressor=compressor)


def largest(share, decay=1.0):
    top_k = slamb_jax.compressors.top_k(share, AXIS)
    return slamb_jax.compress_with_error_feedback(top_k, decay=decay)


def test_a_missing_gradient_moves_nothing():
    tx, params = every(1, "uniform8", outer=NESTEROV), random_tree(SHAPES, 0)
    run = over_workers(tx.update, "vmap", 2)
    with standard_promotion():
        u, state = run(*stack((params | {"w": None}, tx.init(params), params), 2))
    assert u["w"] is None
    np.testing.assert_array_equal(state.anchor["w"][0], params["w"])


@pytest.mark.parametrize(
    ("tx", "mapping"),
    [
        (every(2), "shard_map"),
        (every(1, overlap=True), "shard_map"),
        (every(2, "uniform8", outer=NESTEROV), "shard_map"),
        (every(2, "bfloat16", outer=NESTEROV, overlap=True), "shard_map"),
        (every(2, "uniform4", outer=optax.sgd(1.0)), "vmap"),
        (every(2, compressor=largest(0.5), outer=optax.sgd(1.0)), "shard_map"),
    ],
)
def test_local_steps_end_at_the_minimum_of_the_mean(tx, mapping):
    """A state that is made on the workers keeps its types."""
    rate = optax.linear_schedule(0.3, 0.0, 200)
    targets = {name: 1.0 + np.arange(N, dtype="f") for name in SHAPES}
    params = descend(
        optax.chain(optax.sgd(rate), tx),
        lambda p, own, t: jax.tree.map(jnp.subtract, p, own),
        random_tree(SHAPES, 0), targets, 200, mapping,
    )  # fmt: skip
    for x in jax.tree.leaves(params):
        np.testing.assert_allclose(x.mean(0), 2.5, atol=0.02)


def test_a_compressor_of_the_whole_is_an_outer_step_in_float32():
    runs = []
    for tx in (
        every(3, outer=NESTEROV),
        every(3, compressor=largest(1.0, decay=0.5), outer=NESTEROV),
    ):
        targets = {name: 1.0 + np.arange(N, dtype="f") for name in SHAPES}
        run = descend(
            optax.chain(optax.sgd(0.1), tx),
            lambda p, own, t: jax.tree.map(jnp.subtract, p, own),
            random_tree(SHAPES, 0), targets, 7,
        )  # fmt: skip
        runs.append(run)
    assert_close(*runs)


@pytest.mark.parametrize("settings", [{}, {"payload": "uniform8", "outer": NESTEROV}])
def test_a_compressor_needs_an_outer_optimizer_and_no_payload(settings):
    with pytest.raises(ValueError, match=r"compressor sends .* outer optimizer"):
        every(3, compressor=largest(0.5), **settings)


@pytest.mark.parametrize(
    "compressor",
    [
        slamb_jax.compressors.top_k(0.5, AXIS),
        slamb_jax.compressors.low_rank(1, AXIS),
        slamb_jax.compressors.of_exchange(slamb_jax.Exchange(AXIS)),
    ],
)
def test_a_compressor_that_leaves_what_it_does_not_send_to_others_is_refused(
    compressor,
):
    tx = every(2, compressor=compressor, outer=NESTEROV)
    for params in (jnp.ones((2, 4)), {"a": jnp.ones((2, 4))}):
        with pytest.raises(ValueError, match="give compress_with_error_feedback"):
            jax.vmap(lambda p: tx.update(p, tx.init(p), p), axis_name=AXIS)(params)


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, "float32"),
        ({}, "bfloat16"),
        ({"overlap": True}, "float32"),
        ({"outer": NESTEROV}, "float32"),
        ({"outer": NESTEROV, "overlap": True}, "bfloat16"),
        ({"outer": NESTEROV, "payload": "uniform8"}, "float32"),
        ({"outer": NESTEROV, "compressor": largest(0.5)}, "float32"),
    ],
)
def test_an_infinite_constant_stays_as_it_is(settings, dtype):
    """As a mask of -inf among the parameters, whose gradient is 0."""
    tx = every(2, **settings)
    masks = jnp.array([[-jnp.inf, jnp.inf, 0.0]] * 2, dtype)

    def worker(mask, w):
        p = {"mask": mask, "w": w}
        state = tx.init(p)
        for _ in range(5):
            moves = {"mask": jnp.zeros_like(mask), "w": 0.1 * p["w"]}
            u, state = tx.update(moves, state, p)
            p = optax.apply_updates(p, u)
        return p

    w = jnp.arange(2.0 * 3).reshape(2, 3)
    trained = jax.jit(jax.vmap(worker, axis_name=AXIS))(masks, w)
    np.testing.assert_array_equal(trained["mask"], masks)
    assert jnp.isfinite(trained["w"]).all()
