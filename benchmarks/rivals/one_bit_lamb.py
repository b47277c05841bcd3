"""1-bit LAMB: after a dense warm-up, the momentum travels as signs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import (
    Sends,
    deal,
    elements,
    flatten,
    gather,
    mean,
    mean_sends,
    unflatten,
)
from slamb_jax._axes import cond


class OneBitLambState(NamedTuple):
    count: jax.Array
    mu: Any  # as params, like all trees here, float32
    nu: Any  # frozen after the warm-up
    fresh_nu: Any  # goes on, from rebuilt gradients
    ratio: Any  # moving average of the trust ratio, a scalar a leaf
    scale: Any  # of the momentum before signs are taken, a scalar a leaf
    factor: Any  # of the frozen ratio, a scalar a leaf
    error: jax.Array  # what the signs took from this worker's momentum, (d,)
    owner_error: jax.Array  # and from the mean of the slice that it owns, (d / n,)


def one_bit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    workers: int,
    warmup_steps: int,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
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

    def init(params: Any) -> OneBitLambState:
        zeros = [optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(3)]
        ones = jax.tree.map(lambda p: jnp.ones([]), params)
        padded = _padded(elements(params), workers)
        return OneBitLambState(
            jnp.zeros([], jnp.int32),
            *zeros,
            jax.tree.map(jnp.zeros_like, ones),
            ones,
            jax.tree.map(jnp.copy, ones),
            jnp.zeros(padded),
            jnp.zeros(padded // workers),
        )

    def update(
        updates: Any, state: OneBitLambState, params: Any
    ) -> tuple[Any, OneBitLambState]:
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        warm = state.count < warmup_steps
        u, state = cond(warm, dense, compressed, updates, state, params)
        u = jax.tree.map(lambda u, p: (-rate * u).astype(p.dtype), u, params)
        return u, state

    def dense(
        grads: Any, state: OneBitLambState, params: Any
    ) -> tuple[Any, OneBitLambState]:
        g = mean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), axis_name)
        mu = optax.tree.update_moment(g, state.mu, b1, 1)
        nu = optax.tree.update_moment(g, state.nu, b2, 2)
        u = jax.tree.map(
            lambda m, v, p: m / (jnp.sqrt(v) + eps) + weight_decay * p, mu, nu, params
        )
        c = jax.tree.map(
            lambda p, u: jnp.clip(_quotient(_norm(p), _norm(u)), 0.01, 10.0), params, u
        )
        ratio = jax.tree.map(lambda old, c: 0.9 * old + 0.1 * c, state.ratio, c)
        u = jax.tree.map(lambda c, u: c * u, c, u)
        count = optax.safe_increment(state.count)
        return u, state._replace(count=count, mu=mu, nu=nu, ratio=ratio)

    def compressed(
        grads: Any, state: OneBitLambState, params: Any
    ) -> tuple[Any, OneBitLambState]:
        first = state.count == warmup_steps
        fresh = jax.tree.map(
            lambda v, f: jnp.where(first, v, f), state.nu, state.fresh_nu
        )
        scale = jax.tree.map(
            lambda new, s: jnp.where(first, new, s), _scales(state.mu), state.scale
        )
        m = optax.tree.update_moment(grads, state.mu, b1, 1)
        m = jax.tree.map(lambda m, s: m * s, m, scale)
        flat, error, owner_error = sign_mean(
            flatten(m), state.error, state.owner_error, axis_name
        )
        mu = jax.tree.map(
            lambda m, s, v: jnp.where(v > 0, m / s, 0.0),
            unflatten(flat, m),
            scale,
            state.nu,
        )
        g = jax.tree.map(lambda m, old: (m - b1 * old) / (1 - b1), mu, state.mu)
        fresh = optax.tree.update_moment(g, fresh, b2, 2)

        def leaf(m: Any, v: Any, f: Any, p: Any, c: Any, last: Any) -> tuple:
            u0 = m / (jnp.sqrt(v) + eps)
            u = u0 + weight_decay * p
            factor = jnp.max((jnp.sqrt(v) + eps) / (jnp.sqrt(f) + eps))
            share = jnp.minimum(_quotient(_norm(u0), _norm(u)), 1.0)
            factor = jnp.clip(share * factor + 1 - share, 0.5, 4.0)
            factor = jnp.clip(factor, 0.9 * last, 1.1 * last)
            return c * factor * u, factor

        both = jax.tree.map(
            leaf, mu, state.nu, fresh, params, state.ratio, state.factor
        )
        pairs = jax.tree.structure(params).flatten_up_to(both)
        u, factor = (
            jax.tree.unflatten(jax.tree.structure(params), part)
            for part in zip(*pairs, strict=True)
        )
        return u, OneBitLambState(
            optax.safe_increment(state.count), mu, state.nu, fresh, state.ratio,
            scale, factor, error, owner_error,
        )  # fmt: skip

    return optax.GradientTransformation(init, update)


def sign_mean(
    x: jax.Array, error: jax.Array, owner_error: jax.Array, axis_name: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean of x (d,) over the workers as signs, and both new errors.

    Each worker sends each owner of a slice its signs and one magnitude; owners
    average, and send signs and a magnitude of that to all.
    """
    d, n = x.size, error.size // owner_error.size
    x = jnp.pad(x, (0, error.size - d)) + error
    real = (jnp.arange(error.size, dtype=jnp.int32) < d).reshape(n, -1)
    bits, magnitude, said = _signs(x.reshape(n, -1), real)
    error = x - said.reshape(-1)
    magnitudes = gather(magnitude, axis_name)
    mine = _spread(deal(bits, axis_name), magnitudes[:, None])
    owned = real[jax.lax.axis_index(axis_name)]
    y = jnp.where(owned, jnp.mean(mine, 0) + owner_error, 0.0)
    bits, magnitude, said = _signs(y, owned)
    out = _spread(gather(bits, axis_name), gather(magnitude, axis_name)[:, None])
    return out.reshape(-1)[:d], error, y - said


def _signs(x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Packed signs, the magnitude ‖x‖/√N, and what the two say together."""
    magnitude = _norm(x) / jnp.sqrt(jnp.maximum(jnp.sum(real), 1).astype(jnp.float32))
    said = jnp.where(real, jnp.where(x >= 0, magnitude, -magnitude), 0.0)
    return jnp.packbits(x >= 0, axis=-1), magnitude, said


def _spread(bits: jax.Array, magnitude: jax.Array) -> jax.Array:
    positive = jnp.unpackbits(bits, axis=-1) == 1
    return jnp.where(positive, magnitude, -magnitude)


def _scales(mu: Any) -> Any:
    """What brings each leaf's RMS to the mean of them all."""
    rms = jax.tree.map(lambda m: _norm(m) / m.size**0.5, mu)
    leaves = jax.tree.leaves(rms)
    average = sum(leaves) / len(leaves)
    return jax.tree.map(lambda r: _quotient(average, r), rms)


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x)))


def _quotient(a: jax.Array, b: jax.Array) -> jax.Array:
    """a / b; 1 where one of them is 0."""
    defined = (a > 0) & (b > 0)
    return jnp.where(defined, a / jnp.where(defined, b, 1.0), 1.0)


def _padded(d: int, workers: int) -> int:
    """d, up to where every owner's slice fills whole bytes."""
    return d + -d % (8 * workers)


def one_bit_lamb_sends(
    params: Any, workers: int, step: int, warmup_steps: int
) -> Sends:
    """Warm-up: a float32 mean. Then a bit an element, dealt out and gathered, with a
    float32 magnitude each time."""
    d = elements(params)
    if step <= warmup_steps:
        return mean_sends(d, workers)
    packed = _padded(d, workers) // 8
    gathers = (4, packed // workers, 4)
    return [("all-to-all", packed), *(("all-gather", size) for size in gathers)]
