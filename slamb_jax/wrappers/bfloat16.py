"""Training in bfloat16: 16-bit parameters that do not lose their small steps."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core.checks import (
    check_choice,
    check_floating,
    check_integer,
    check_params,
    check_transformation,
)
from slamb_jax._core.leaves import Leaf, keep_absent, map_numbered, map_present
from slamb_jax._core.rounding import (
    hash_u32,
    next_step,
    round_to,
    step_seed,
    stochastic_round,
    upcast_f32,
)


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

    **"master"** keeps a float32 copy P of the parameters in the state:

    .. math::

      P \leftarrow P + inner(g, P), \quad p \leftarrow \text{P rounded to nearest}

    **"stochastic"** keeps no copy; p becomes one of two neighbours, with an unbiased
    mean:

    .. math::

      x = p + inner(g, p), \quad p \leftarrow \lceil x \rceil \text{ with probability }
        (x - \lfloor x \rfloor) / (\lceil x \rceil - \lfloor x \rfloor),
        \text{ else } \lfloor x \rfloor

    The updates are bfloat16, and ``optax.apply_updates`` gives these bits unless a
    parameter changes its sign or by more than a factor of 2 in one step: the result is
    then within 1/256 of the distance it moved. With "master" the next update corrects
    that; with "stochastic" it is unbiased.

    ``inner`` gets gradients and parameters in float32. With "master" it averages the
    master copy: overwriting p with :func:`average_parameters` has no effect there.
    Random bits are the same on all workers, so that replicas which agree stay so.
    Parameters of 32 bits are stepped as usual.

    Args:
      inner: the optimizer, such as :func:`slamb`. Bytes per parameter, with p, m and v:
        for "master" 14 with m and v in float32 and 10 with both in bfloat16, for
        "stochastic" 10 and 6.
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

    def to_bfloat16(x: jax.Array, seed: jax.Array) -> jax.Array:
        if rounding == "master":
            return round_to(x, jnp.bfloat16)
        return stochastic_round(x, seed)

    def init(params: optax.Params) -> TrainInBfloat16State:
        check_floating(params, "params")
        for path, p in jax.tree_util.tree_leaves_with_path(params):
            if p.dtype == jnp.float16:
                raise ValueError(
                    "params must be bfloat16 or float32, got float16 at "
                    f"params{jax.tree_util.keystr(path)}"
                )
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
        step = next_step(state.count)
        old = jax.tree.map(
            lambda p, x: p if _is_wide(p) else upcast_f32(x),
            params,
            params if state.master is None else state.master,
        )
        grads = map_present(upcast_f32, updates)
        u, inner_state = tx.update(grads, state.inner, old, **extra_args)

        def rounded(leaf: Leaf, u: jax.Array, p: jax.Array, x: jax.Array) -> jax.Array:
            if _is_wide(p):
                return u
            own = step_seed(step, seed, leaf.index)
            new = to_bfloat16(x + u, own)
            return to_bfloat16(upcast_f32(new) - upcast_f32(p), hash_u32(own, 1))

        out = map_numbered(rounded, u, params, old, like=params)
        master = state.master
        if master is not None:
            master = keep_absent(map_present(jnp.add, u, old), old)
        return out, TrainInBfloat16State(step, master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_wide(x: jax.Array) -> bool:
    return x.dtype.itemsize >= 4
