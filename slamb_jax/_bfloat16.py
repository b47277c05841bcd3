"""Training in bfloat16: parameters of 16 bits whose small steps are not lost."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from slamb_jax._checks import (
    check_choice,
    check_floating,
    check_integer,
    check_params,
    check_transformation,
)
from slamb_jax._collectives import narrowed
from slamb_jax._hashing import hash_u32, hash_words
from slamb_jax._leaves import Leaf, map_numbered, map_present

ROUNDINGS = ("master", "stochastic")


class TrainInBfloat16State(NamedTuple):
    """State of :func:`train_in_bfloat16`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    master: optax.Params | None  # as params, float32; None with stochastic rounding
    inner: optax.OptState


def train_in_bfloat16(
    inner: optax.GradientTransformation, rounding: str = "master", *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Steps parameters of bfloat16, whose 8 bits would lose most small steps.

    A parameter that moves by less than 1/256 of itself rounds back to where it was.
    With the update :math:`u` that ``inner`` computes, in float32:

    **"master"** keeps a float32 copy P of the parameters in the state:

    .. math::

      u = inner(g, P), \quad P \leftarrow P + u, \quad
      p \leftarrow \text{P rounded to nearest}

    **"stochastic"** keeps no copy; p takes one of its two neighbours, so that the
    mean is right:

    .. math::

      u = inner(g, p), \quad x = p + u, \quad
      p \leftarrow \begin{cases}
        \lceil x \rceil & \text{with probability }
          (x - \lfloor x \rfloor) / (\lceil x \rceil - \lfloor x \rfloor) \\
        \lfloor x \rfloor & \text{otherwise} \end{cases}

    The exponent is float32's, so no loss scale is needed. What ``update`` returns is
    bfloat16, and ``optax.apply_updates`` gives these bits under either type promotion
    of jax wherever a difference of bfloat16 is exact, that is unless a parameter
    changes its sign or by more than a factor of 2 in one step: it then lands within
    1/256 of the distance that it went. (A sum of two numbers of 16 bits cannot do
    better.) With "master" the next update puts that right; with "stochastic" it is
    unbiased.

    ``inner`` sees float32: gradients and parameters. What it averages over the workers
    is the master copy, which counts: to overwrite p with :func:`average_parameters`
    does nothing there. Random bits are a hash of seed, step and element, the same on
    all workers, so that replicas which agree go on agreeing. Parameters of 32 bits are
    stepped as they are.

    Args:
      inner: the optimizer, such as :func:`slamb`. With its m and v in float32,
        "master" takes 14 bytes per parameter, p included, "stochastic" 10; with
        ``mu_dtype`` and ``nu_dtype`` of :func:`slamb` "bfloat16" 10 and 6; a float32
        optimizer 12.
      rounding: ``"master"`` or ``"stochastic"``.
      seed: changes the random bits; must be the same on all workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``. ``init``
      may get the parameters in float32, of which the master copy then loses nothing.

    Raises:
      ValueError: for an unknown ``rounding``; in ``init``, for parameters of
        float16, whose exponent is too small; in ``update``, without ``params``.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> tx = slamb_jax.train_in_bfloat16(optax.sgd(1e-3))
      >>> params = jnp.ones(3, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> for _ in range(100):
      ...     updates, state = tx.update(jnp.ones(3, jnp.bfloat16), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(params)  # rounded each time, it would still be 1
      [0.898438 0.898438 0.898438]

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2017: master copies; Zamirai et al.,
      `Revisiting BFloat16 Training <https://arxiv.org/abs/2010.06192>`_, 2020:
      stochastic rounding.
    """
    check_transformation("inner", inner)
    check_choice("rounding", rounding, ROUNDINGS)
    check_integer("seed", seed)
    tx = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> TrainInBfloat16State:
        check_floating(params, "params")
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if p.dtype == jnp.float16:
                raise ValueError(
                    "params must be bfloat16 or float32, got float16 at "
                    f"params{jax.tree_util.keystr(path)}"
                )
        wide = jax.tree.map(_copy, params)  # never the parameters' own: donated
        master = wide if rounding == "master" else None
        return TrainInBfloat16State(jnp.zeros([], jnp.int32), master, tx.init(wide))

    def update(
        updates: optax.Updates,
        state: TrainInBfloat16State,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, TrainInBfloat16State]:
        check_params(params)
        step = optax.safe_increment(state.count)
        old = params if state.master is None else state.master
        old = jax.tree.map(lambda x, p: _wide(p if _is_wide(p) else x), old, params)
        u, inner_state = tx.update(
            map_present(_wide, updates), state.inner, old, **extra_args
        )

        def rounded(leaf: Leaf, u: jax.Array, p: jax.Array, x: jax.Array) -> jax.Array:
            if _is_wide(p):
                return u
            if rounding == "master":
                return _difference(_nearest(x + u), p, _nearest)
            salt = step_salt(step, seed, leaf.index)

            def at_random(x: jax.Array, salt: jax.Array = salt) -> jax.Array:
                return round_at_random(x, salt)

            again = hash_u32(salt, 1)
            return _difference(at_random(x + u), p, lambda d: at_random(d, again))

        out = map_numbered(rounded, u, params, old, like=params)
        master = state.master
        if master is not None:
            master = jax.tree.map(
                lambda u, x: x if u is None else x + u, u, old, is_leaf=_is_none
            )
        return out, TrainInBfloat16State(step, master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def step_salt(step: jax.Array, *words: int) -> jax.Array:
    """What a step's hashes are salted with: uint32, another for each step."""
    return hash_u32(step.astype(jnp.uint32), hash_words(*words))


def round_at_random(x: jax.Array, salt: jax.Array) -> jax.Array:
    """Float32 rounded to bfloat16 at random, unbiased; by a hash of the place."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    noise = hash_u32(_places(x.shape), salt) >> np.uint32(16)
    up = jnp.where(jnp.isfinite(x), bits + noise, bits)
    # What is no number stays none: its upper bits alone could be those of infinity.
    return _from_upper(jnp.where(jnp.isnan(x), np.uint32(0x7FC00000), up))


def _nearest(x: jax.Array) -> jax.Array:
    return narrowed(x, jnp.bfloat16)


def _from_upper(bits: jax.Array) -> jax.Array:
    upper = (bits >> np.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)


def _difference(q: jax.Array, p: jax.Array, rounded: Any) -> jax.Array:
    """The update in 16 bits that takes p to q, or as near as one can."""
    return rounded(_wide(q) - _wide(p))


def _places(shape: tuple[int, ...]) -> jax.Array:
    """The number of each element, row-major, modulo 2**32; no reshape of a shard."""
    places = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, axis)
        places += along * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return places


def _wide(x: jax.Array) -> jax.Array:
    return x if _is_wide(x) else x.astype(jnp.float32)


def _copy(x: jax.Array) -> jax.Array:
    return jnp.array(_wide(x), copy=True)


def _is_wide(x: jax.Array) -> bool:
    return x.dtype.itemsize >= 4


def _is_none(x: Any) -> bool:
    return x is None
