"""Training in bfloat16: 16-bit parameters that do not lose their small steps."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._tree.checks import (
    check_choice,
    check_floating,
    check_integer,
    check_params,
    check_transformation,
)
from slamb_jax._tree.hashing import hash_u32
from slamb_jax._tree.leaves import Leaf, is_none, map_numbered, map_present
from slamb_jax._tree.rounding import round_to, step_seed, stochastic_round, upcast_f32


class TrainInBfloat16State(NamedTuple):
    """State of :func:`train_in_bfloat16`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    master: optax.Params | None  # as params, float32; None with stochastic rounding
    inner: optax.OptState


def train_in_bfloat16(
    inner: optax.GradientTransformation,
    rounding: Literal["master", "stochastic"] = "master",
    *,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Steps bfloat16 parameters, whose 8 bits would lose most small steps.

    A parameter that moves by less than 1/256 of itself is rounded back to where it was.
    With the update :math:`u` that ``inner`` computes, in float32:

    **"master"** keeps a float32 copy P of the parameters in the state:

    .. math::

      u = inner(g, P), \quad P \leftarrow P + u, \quad
      p \leftarrow \text{P rounded to nearest}

    **"stochastic"** keeps no copy; p becomes one of its two neighbours, with an
    unbiased mean:

    .. math::

      u = inner(g, p), \quad x = p + u, \quad
      p \leftarrow \begin{cases}
        \lceil x \rceil & \text{with probability }
          (x - \lfloor x \rfloor) / (\lceil x \rceil - \lfloor x \rfloor) \\
        \lfloor x \rfloor & \text{otherwise} \end{cases}

    The exponent is float32's, so no loss scale is needed. What ``update`` returns is
    bfloat16, and ``optax.apply_updates`` gives these bits under either type promotion
    of jax wherever a difference of bfloat16 is exact, that is unless a parameter
    changes its sign or by more than a factor of 2 in one step: the result is then
    within 1/256 of the distance it moved. (A sum of two 16-bit numbers cannot be
    nearer.) With "master" the next update corrects that; with "stochastic" it is
    unbiased.

    ``inner`` gets gradients and parameters in float32. It averages the master copy
    over the workers: overwriting p with :func:`average_parameters` has no effect
    there. Random bits are a hash of seed, step and element, the same on all workers,
    so that replicas which agree stay so. Parameters of 32 bits are stepped as usual.

    Args:
      inner: the optimizer, such as :func:`slamb`. With its m and v in float32,
        "master" takes 14 bytes per parameter, p included, "stochastic" 10; with
        ``mu_dtype`` and ``nu_dtype`` of :func:`slamb` "bfloat16" 10 and 6; a float32
        optimizer 12.
      rounding: ``"master"`` or ``"stochastic"``.
      seed: changes the random bits; must be the same on all workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``. ``init``
      may get the parameters in float32, which the master copy then keeps exactly.

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
      >>> print(params)  # rounded at each step, it would still be 1
      [0.898438 0.898438 0.898438]

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2017: master copies; Zamirai et al.,
      `Revisiting BFloat16 Training <https://arxiv.org/abs/2010.06192>`_, 2020:
      stochastic rounding.
    """
    check_transformation("inner", inner)
    check_choice("rounding", rounding, ("master", "stochastic"))
    check_integer("seed", seed)
    tx = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> TrainInBfloat16State:
        _check_dtypes(params)
        # A copy even of float32: the parameters' own buffers may be donated.
        wide = jax.tree.map(lambda p: jnp.array(upcast_f32(p), copy=True), params)
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
        old = jax.tree.map(
            lambda x, p: p if _is_wide(p) else upcast_f32(x), old, params
        )
        grads = map_present(upcast_f32, updates)
        u, inner_state = tx.update(grads, state.inner, old, **extra_args)

        def rounded(leaf: Leaf, u: jax.Array, p: jax.Array, x: jax.Array) -> jax.Array:
            if _is_wide(p):
                return u
            if rounding == "master":
                return _difference(_nearest(x + u), p, _nearest)
            own = step_seed(step, seed, leaf.index)
            other = hash_u32(own, 1)
            new = stochastic_round(x + u, own)
            return _difference(new, p, lambda d: stochastic_round(d, other))

        out = map_numbered(rounded, u, params, old, like=params)
        master = state.master
        if master is not None:
            master = jax.tree.map(
                lambda u, x: x if u is None else x + u, u, old, is_leaf=is_none
            )
        return out, TrainInBfloat16State(step, master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_dtypes(params: optax.Params) -> None:
    check_floating(params, "params")
    for path, p in jax.tree_util.tree_leaves_with_path(params):
        if p.dtype == jnp.float16:
            raise ValueError(
                "params must be bfloat16 or float32, got float16 at "
                f"params{jax.tree_util.keystr(path)}"
            )


def _nearest(x: jax.Array) -> jax.Array:
    return round_to(x, jnp.bfloat16)


def _difference(
    new: jax.Array, p: jax.Array, rounded: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """The 16-bit update from p to ``new``, or as near as there is one."""
    return rounded(upcast_f32(new) - upcast_f32(p))


def _is_wide(x: jax.Array) -> bool:
    return x.dtype.itemsize >= 4
