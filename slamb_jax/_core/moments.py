"""The rules that the links share: moments as they are kept, their bias, decay."""

from typing import Any, Literal, NamedTuple, TypeAlias, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from slamb_jax._core.checks import check_range
from slamb_jax._core.leaves import Leaf, check_mask
from slamb_jax._core.platform import computed_apart
from slamb_jax._core.rounding import step_seed, stochastic_round

Form = Literal["sum", "product"]
Decays: TypeAlias = ArrayLike | chex.ArrayTree
"""A decay rate for all leaves, or a tree of them: a prefix of the parameters'."""


class Moments(NamedTuple):
    """Two moments as they lie in memory, and the factors that correct their bias.

    ``mask_momentum`` hands them to its direction as the argument ``moments``, so that
    ``layerwise_trust_ratio`` can compute a direction twice in place of keeping it.
    """

    mu: optax.Updates
    nu: optax.Updates
    of_mu: optax.Updates  # a factor for each leaf, whose b1 may be its own
    of_nu: jax.Array


def check_decay(weight_decay: Any, mask: Any) -> None:
    """Raises for a decay that is negative, and for a mask that is not of bools."""
    check_range("weight_decay", weight_decay, 0.0, schedule=True)
    check_mask("mask", mask)


def weights(b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The decay b and 1 - b, in float32; of a number, constants of the program."""
    as_array = jnp.asarray if isinstance(b, jax.Array) else np.asarray
    both = as_array(b, np.float32), as_array(1 - b, np.float32)
    return cast(tuple[jax.Array, jax.Array], both)


def bias(b: ArrayLike, step: jax.Array) -> jax.Array:
    r""":math:`1-\beta^t`, rounded as in optax."""
    return 1 - weights(b)[0] ** step.astype(jnp.float32)


def moved(old: jax.Array, x: jax.Array, b: ArrayLike) -> jax.Array:
    r""":math:`\beta\,old + (1-\beta)\,x`, in float32."""
    keep, new = weights(b)
    return keep * old.astype(jnp.float32) + new * x.astype(jnp.float32)


def stored(v: jax.Array, dtype: jnp.dtype, step: jax.Array, leaf: Leaf) -> jax.Array:
    r"""A second moment in the dtype it is kept in.

    To bfloat16 it is rounded at random: a change of :math:`1-\beta_2` of itself would
    be rounded to none.
    """
    if dtype != jnp.bfloat16:
        return v
    return stochastic_round(v, step_seed(step, leaf.index))


def stored_apart(nus: list[Any]) -> list[Any]:
    """Second moments for the state, where something else reads them in this step."""
    return computed_apart(nus)


def decay_at(
    weight_decay: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array | None:
    """The decay at a step counted from 0; None where it is the constant 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return None
    decay = weight_decay(count) if callable(weight_decay) else weight_decay
    return jnp.asarray(decay, jnp.float32)
