"""1-bit LAMB: after a dense warm-up, only signs of the momentum are communicated."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from benchmarks.rivals.exchange import Rival, Sends, elements, mean, mean_sends


class OneBitLambState(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    mu: optax.Updates  # as params, like all trees here, float32
    nu: optax.Updates  # frozen after the warm-up
    fresh_nu: optax.Updates  # goes on, from rebuilt gradients
    ratio: optax.Params  # moving average of the trust ratio, a scalar a leaf
    scale: optax.Params  # of the momentum before signs are taken, a scalar a leaf
    factor: optax.Params  # of the frozen ratio, a scalar a leaf
    worker_error: jax.Array  # that the signs took from this worker's momentum, (d,)
    server_error: jax.Array  # and from the mean of the slice that it owns, (d / n,)


def one_bit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    workers: int,
    warmup_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Rival:
    r"""LAMB, and from ``warmup_steps`` on with a momentum of one bit an element.

    Warm-up, with mean gradients and no bias correction: :math:`u = m/(\sqrt v +
    \varepsilon) + \lambda p`, :math:`c = \text{clip}(\|p\|/\|u\|, 0.01, 10)`,
    :math:`\bar c \leftarrow 0.9 \bar c + 0.1 c`, :math:`p \leftarrow p - lr\,c\,u`.
    Then v and :math:`\bar c` are frozen, and

    .. math::

      m' &= \text{signs of } \beta_1 m + (1-\beta_1) g, \text{ averaged}, \quad
      \tilde g = (m' - \beta_1 m)/(1-\beta_1) \\
      f &= \max \frac{\sqrt v + \varepsilon}{\sqrt{v_f} + \varepsilon}
        \text{ blended and clipped}, \quad
      p \leftarrow p - lr\,\bar c\,f\,(m'/(\sqrt v + \varepsilon) + \lambda p)

    where :math:`v_f` goes on from :math:`\tilde g`. Where v is 0 at the end of the
    warm-up m' is 0, which the authors' program leaves to a mask that users give: signs
    over ε alone would be giant steps. (Li et al., 2021,
    https://arxiv.org/abs/2104.06069.)
    """

    def init(params: optax.Params) -> OneBitLambState:
        mu, nu, fresh = (
            optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(3)
        )
        ratio, scale, factor = (
            jax.tree.map(lambda p, x=x: jnp.full([], x), params)
            for x in (0.0, 1.0, 1.0)
        )
        padded = _padded(params, workers)
        errors = jnp.zeros(padded), jnp.zeros(padded // workers)
        count = jnp.zeros([], jnp.int32)
        return OneBitLambState(count, mu, nu, fresh, ratio, scale, factor, *errors)

    def update(
        updates: optax.Updates, state: OneBitLambState, params: optax.Params
    ) -> tuple[optax.Updates, OneBitLambState]:
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        warm = state.count < warmup_steps
        u, new = jax.lax.cond(warm, dense, compressed, updates, state, params)
        u = jax.tree.map(lambda u, p: (-rate * u).astype(p.dtype), u, params)
        return u, new._replace(count=optax.safe_increment(state.count))

    def direction(m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
        return m / (jnp.sqrt(v) + eps) + weight_decay * p

    def dense(
        grads: optax.Updates, state: OneBitLambState, params: optax.Params
    ) -> tuple[optax.Updates, OneBitLambState]:
        g = mean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), axis_name)
        mu = optax.tree.update_moment(g, state.mu, b1, 1)
        nu = optax.tree.update_moment(g, state.nu, b2, 2)
        u = jax.tree.map(direction, mu, nu, params)
        c = jax.tree.map(
            lambda p, u: jnp.clip(_quotient(_norm(p), _norm(u)), 0.01, 10.0), params, u
        )
        ratio = jax.tree.map(lambda old, c: 0.9 * old + 0.1 * c, state.ratio, c)
        u = jax.tree.map(lambda c, u: c * u, c, u)
        return u, state._replace(mu=mu, nu=nu, ratio=ratio)

    def compressed(
        grads: optax.Updates, state: OneBitLambState, params: optax.Params
    ) -> tuple[optax.Updates, OneBitLambState]:
        def at_first(new: Any, old: Any) -> Any:
            first = state.count == warmup_steps
            return jax.tree.map(lambda a, b: jnp.where(first, a, b), new, old)

        fresh = at_first(state.nu, state.fresh_nu)
        scale = at_first(_scales(state.mu), state.scale)
        m = optax.tree.update_moment(grads, state.mu, b1, 1)
        flat, unravel = ravel_pytree(jax.tree.map(lambda m, s: m * s, m, scale))
        flat, *errors = sign_mean(
            flat, state.worker_error, state.server_error, axis_name
        )
        mu = jax.tree.map(
            lambda m, s, v: jnp.where(v > 0, m / s, 0.0),
            unravel(flat),
            scale,
            state.nu,
        )
        g = jax.tree.map(lambda m, old: (m - b1 * old) / (1 - b1), mu, state.mu)
        fresh = optax.tree.update_moment(g, fresh, b2, 2)
        u = jax.tree.map(direction, mu, state.nu, params)

        def next_factor(m: Any, v: Any, f: Any, u: Any, last: Any) -> jax.Array:
            factor = jnp.max((jnp.sqrt(v) + eps) / (jnp.sqrt(f) + eps))
            undecayed = _norm(m / (jnp.sqrt(v) + eps))
            share = jnp.minimum(_quotient(undecayed, _norm(u)), 1.0)
            factor = jnp.clip(share * factor + 1 - share, 0.5, 4.0)
            return jnp.clip(factor, 0.9 * last, 1.1 * last)

        factor = jax.tree.map(next_factor, mu, state.nu, fresh, u, state.factor)
        u = jax.tree.map(lambda c, f, u: c * f * u, state.ratio, factor, u)
        return u, OneBitLambState(
            state.count, mu, state.nu, fresh, state.ratio, scale, factor, *errors
        )

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        # A bit an element, dealt out and gathered, each time with a float32 magnitude.
        if step <= warmup_steps:
            return mean_sends(elements(params), workers)
        packed = _padded(params, workers) // 8
        gathers = (4, packed // workers, 4)
        return [("all-to-all", packed), *(("all-gather", size) for size in gathers)]

    return Rival(optax.GradientTransformation(init, update), sends)


def sign_mean(
    x: jax.Array, worker_error: jax.Array, server_error: jax.Array, axis_name: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean of x (d,) over the workers as signs, and both new errors.

    Each worker sends each owner of a slice its signs and one magnitude; owners
    average, and send signs and a magnitude of that to all.
    """
    d, n = x.size, worker_error.size // server_error.size
    x = jnp.pad(x, (0, worker_error.size - d)) + worker_error
    real = (jnp.arange(x.size, dtype=jnp.int32) < d).reshape(n, -1)
    bits, magnitude, rounded = _signs(x.reshape(n, -1), real)
    magnitudes = jax.lax.all_gather(magnitude, axis_name)
    theirs = jax.lax.all_to_all(bits, axis_name, split_axis=0, concat_axis=0)
    average = jnp.mean(_unpack(theirs, magnitudes[:, None]), 0)
    owned = real[jax.lax.axis_index(axis_name)]
    y = jnp.where(owned, average + server_error, 0.0)
    bits, magnitude, rounded_mean = _signs(y, owned)
    all_bits, magnitudes = (
        jax.lax.all_gather(part, axis_name) for part in (bits, magnitude)
    )
    out = _unpack(all_bits, magnitudes[:, None]).reshape(-1)[:d]
    return out, x - rounded.reshape(-1), y - rounded_mean


def _signs(x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed signs, the magnitude ‖x‖/√N, and the array that they encode."""
    magnitude = _norm(x) / jnp.sqrt(jnp.maximum(jnp.sum(real), 1).astype(jnp.float32))
    rounded = jnp.where(real, jnp.where(x >= 0, magnitude, -magnitude), 0.0)
    return jnp.packbits(x >= 0, axis=-1), magnitude, rounded


def _unpack(bits: jax.Array, magnitude: jax.Array) -> jax.Array:
    positive = jnp.unpackbits(bits, axis=-1) == 1
    return jnp.where(positive, magnitude, -magnitude)


def _scales(mu: optax.Updates) -> optax.Params:
    """The factors that bring each leaf's RMS to the mean of them all."""
    rms = jax.tree.map(lambda m: _norm(m) / m.size**0.5, mu)
    average = jnp.mean(jnp.stack(jax.tree.leaves(rms)))
    return jax.tree.map(lambda r: _quotient(average, r), rms)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x)))


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b; 1 where one of them is 0."""
    defined = (a > 0) & (b > 0)
    return jnp.where(defined, a / jnp.where(defined, b, 1.0), 1.0)


def _padded(params: optax.Params, workers: int) -> int:
    """d, rounded up so that every owner's slice fills whole bytes."""
    d = elements(params)
    return d + -d % (8 * workers)
