"""SLAMB as the tests use it, what it is given, and the step of one worker."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from tests.workers import AXIS, over_workers, stack

OF_EXCHANGE, OF_STRIDED = (
    {field.name for field in dataclasses.fields(x)}
    for x in (slamb_jax.Exchange, slamb_jax.selections.Strided)
)


def plain(axis_name=None, **settings):
    """SLAMB as published, in float32; with settings of ``Strided``, too."""
    chosen = {name: settings.pop(name) for name in OF_STRIDED & set(settings)}
    ours = {"payload": None, "sync_every": 100}
    ours |= {"selection": slamb_jax.selections.Strided(**chosen)}
    return slamb_jax.Exchange(axis_name, **ours | settings)


def exchange(**settings):
    """The same between the workers of these tests, of small leaves too."""
    return plain(**{"axis_name": AXIS, "min_size": 20, "sync_every": 3} | settings)


def any_lamb(rate, exchange, **settings):
    """SLAMB of an exchange with a selection, LAMB of another."""
    make = slamb_jax.lamb if exchange.selection is None else slamb_jax.slamb
    return make(rate, exchange, **settings)


def slamb(rate=0.01, **settings):
    """SLAMB over :func:`exchange`; settings of both, told apart by their names."""
    names = (OF_EXCHANGE | OF_STRIDED) & set(settings)
    ours = {name: settings.pop(name) for name in names}
    return slamb_jax.slamb(rate, exchange(**ours), **{"b3": 0.7} | settings)


def flat_slamb(rate, exchange, *, b3, form, eps=1e-6, **ratio):
    """SLAMB as the four links in a row, and what every optax chain ends with."""
    adam = slamb_jax.directions.adam(eps, eps_before_correction=form == "sum")
    return optax.chain(
        slamb_jax.mask_momentum(exchange, adam, 0.9, 0.999),
        slamb_jax.layerwise_trust_ratio(exchange, b3=b3, form=form, **ratio),
        slamb_jax.elementwise_rescale(exchange, b3=b3),
        optax.scale_by_learning_rate(rate),
        slamb_jax.average_parameters_every(exchange),
    )


@contextlib.contextmanager
def standard_promotion():
    """Flax's and optax's own code needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def train_step(tx, loss, within=lambda both: both):
    """The step of one worker on ``loss(params, batch)``; it reports the loss.

    ``within``: of the function that computes the loss and its gradient.
    """

    def step(state, batch):
        params, opt_state = state
        value, grads = within(jax.value_and_grad(loss))(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def step_on_gradients(tx):
    """The step of one worker whose batch is its gradient, with a leading axis of 1."""

    def step(state, batch):
        params, opt_state = state
        grads = jax.tree.map(lambda x: jnp.squeeze(x, 0), batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jnp.float32(0)

    return step


def descend(tx, gradient, params, data, steps, mapping="vmap"):
    """Every worker's parameters after steps of one scan.

    ``gradient`` is of the parameters, the worker's own ``data`` and the step from 0.
    """

    def run(params, own):
        def step(carry, t):
            updates, state = tx.update(gradient(carry[0], own, t), carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        start = params, tx.init(params)
        return jax.lax.scan(step, start, jnp.arange(steps))[0][0]

    n = len(jax.tree.leaves(data)[0])
    with standard_promotion():
        return over_workers(run, mapping, n)(stack(params, n), data)


def gradients(steps, shapes, n):
    """Of workers whose data differ: each has a mean of its own."""
    own = random_tree(shapes, 1000, n)
    noise = [random_tree(shapes, t, n, scale=0.3) for t in range(steps)]
    return [jax.tree.map(jnp.add, own, x) for x in noise]


def random_tree(shapes, seed, *lead, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray((rng.normal(size=(*lead, *shape)) * scale).astype("float32"))
        for name, shape in shapes.items()
    }
