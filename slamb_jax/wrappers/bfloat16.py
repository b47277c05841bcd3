"""Training in bfloat16: 16-bit parameters that do not lose their small steps."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import checks
from slamb_jax._core import rounding as _rounding
from slamb_jax._core.leaves import Leaf, keep_absent, map_present, present
from slamb_jax._core.rounding import upcast_f32


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

    **"master"** keeps a float32 copy P in the state, exact where ``init`` gets float32:

    .. math::

      P \leftarrow P + inner(g, P), \quad p \leftarrow \text{P rounded to nearest}

    **"stochastic"** keeps no copy; p becomes a neighbour of x, with an unbiased mean:

    .. math::

      x = p + inner(g, p), \quad p \leftarrow \lceil x \rceil \text{ with probability }
        (x - \lfloor x \rfloor) / (\lceil x \rceil - \lfloor x \rfloor),
        \text{ else } \lfloor x \rfloor

    ``optax.apply_updates`` gives these bits unless a parameter changes its sign or by
    more than a factor of 2 in one step: it is then within 1/256 of the distance it
    moved, which the next update of "master" corrects, and which is unbiased with
    "stochastic". Parameters of 32 bits are stepped as usual. ``inner`` gets all in
    float32. With "master", overwriting p with :func:`average_parameters` has no effect.

    After an average of the parameters, as with an ``outer`` optimizer, the copies P of
    the workers agree to rounding. Their p, which are neighbours then, may differ in the
    last bit of bfloat16 until the next average.

    Args:
      inner: the optimizer, such as :func:`slamb`. Bytes per parameter, with p, m and v:
        for "master" 14 with m and v in float32 and 10 with both in bfloat16, for
        "stochastic" 10 and 6.
      rounding: ``"master"`` or ``"stochastic"``.
      seed: of the random bits; the same on all workers, so that replicas stay equal.

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
      Micikevicius et al. 2017 (`master copies <https://arxiv.org/abs/1710.03740>`_);
      Zamirai et al. 2020 (`stochastic rounding <https://arxiv.org/abs/2010.06192>`_).
    """
    checks.check_transformation("inner", inner)
    checks.check_choice("rounding", rounding, ("master", "stochastic"))
    checks.check_integer("seed", seed)
    tx = optax.with_extra_args_support(inner)

    def wide(p: jax.Array) -> bool:
        return p.dtype.itemsize >= 4

    def init(params: optax.Params) -> TrainInBfloat16State:
        checks.check_floating(params, "params")
        for where, p in checks.named_leaves("params", params).items():
            if p.dtype == jnp.float16:  # the exponent is too small for small steps
                got = f"got float16 at {where}"
                raise ValueError(f"params must be bfloat16 or float32, {got}")
        # A copy even of float32: the parameters' own buffers may be donated.
        copy = jax.tree.map(
            lambda p: _rounding.copied(p, p.dtype if wide(p) else jnp.float32), params
        )
        master = copy if rounding == "master" else None
        return TrainInBfloat16State(jnp.zeros([], jnp.int32), master, tx.init(copy))

    def update(
        updates: optax.Updates,
        state: TrainInBfloat16State,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, TrainInBfloat16State]:
        checks.check_params(params)
        checks.check_real(updates, "updates")
        step = _rounding.next_step(state.count)
        kept = params if state.master is None else state.master
        old = jax.tree.map(lambda p, x: p if wide(p) else upcast_f32(x), params, kept)
        updates = map_present(upcast_f32, updates)
        u, inner_state = tx.update(updates, state.inner, old, **extra_args)

        def rounded(leaf: Leaf, u: jax.Array, p: jax.Array, x: jax.Array) -> jax.Array:
            if wide(p):
                return u
            bits = _rounding.step_seed(step, seed, leaf.index)
            new = upcast_f32(_to_bfloat16(x + u, rounding, bits))
            others = _rounding.hash_u32(bits, 1)
            return _to_bfloat16(new - upcast_f32(p), rounding, others)

        stepped = keep_absent(map_present(jnp.add, u, old), old)
        master = stepped if rounding == "master" else None
        rows, rebuild = present(u, params, old, like=params)
        out = rebuild([rounded(*row) for row in rows])
        return out, TrainInBfloat16State(step, master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _to_bfloat16(x: jax.Array, rounding: str, seed: jax.Array) -> jax.Array:
    if rounding == "master":
        return _rounding.round_to(x, jnp.bfloat16)
    return _rounding.stochastic_round(x, seed)
