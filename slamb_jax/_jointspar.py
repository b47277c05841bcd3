"""JointSpar and JointSpar-LARS: layers are drawn before their gradients are taken."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax import _collectives
from slamb_jax._checks import (
    check_axis_name,
    check_choice,
    check_floating,
    check_integer,
    check_params,
    check_range,
)
from slamb_jax._distribution import check_budget, update_distribution
from slamb_jax._labels import labelled_leaves, layer_names
from slamb_jax._trust_ratio import decay_at, decay_mask

SAMPLINGS = ("shared", "per_worker")
_SETTINGS = """
      learning_rate: a number, or a schedule of the step from 0.
      layers: the label of the layer that each parameter belongs to, a string; None for
        what is trained and exchanged at every step, like embeddings and norms. A tree
        with the structure of the parameters or a prefix of it, or a function of the
        parameters that gives one, as in ``optax.multi_transform``.
"""


class JointSparState(NamedTuple):
    """State of :func:`jointspar` and :func:`jointspar_lars`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    seed: jax.Array  # int32, shape []
    worker: jax.Array  # int32, shape []; 0 unless each worker draws for itself
    log_p: dict[str, jax.Array]  # of each layer, float32, shape []
    max_norm: jax.Array  # L, float32, shape []
    trace: optax.Updates  # momentum, as params


class _Leaf(NamedTuple):
    """What an update of one leaf takes; the flags are static."""

    g: jax.Array
    trace: jax.Array
    p: jax.Array | None
    decays: bool
    scales: bool


Step = Callable[[_Leaf], tuple[jax.Array, jax.Array]]  # to the update and the trace


def active_layers(state: optax.OptState) -> dict[str, jax.Array]:
    r"""The layers whose gradients the next update will use.

    :math:`Z_d \sim \operatorname{Bernoulli}(p_d)` for each layer: a pure function of
    the optimizer's state, so that it can be asked before the gradient is taken, for
    :func:`train_if`; ``update`` finds the same. Call it on the state that goes into
    ``update``.

    Args:
      state: the state of :func:`jointspar` or :func:`jointspar_lars`, or of what
        holds one of them, such as ``optax.chain``.

    Returns:
      For each label a bool array of shape ().

    Raises:
      ValueError: if ``state`` holds no such state, or several.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> params = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}
      >>> tx = slamb_jax.jointspar(0.1, {"a": "a", "b": "b", "c": None}, budget=2)
      >>> active = slamb_jax.active_layers(tx.init(params))
      >>> sorted(active), bool(active["a"])  # s = D: all of them, always
      (['a', 'b'], True)
    """
    return _draw(_find(state))


def layer_probabilities(state: optax.OptState) -> dict[str, jax.Array]:
    """The probability of each layer to be active at the next step.

    Args:
      state: as for :func:`active_layers`.

    Returns:
      For each label a float32 array of shape (); they add up to the budget.

    Raises:
      ValueError: if ``state`` holds no state of JointSpar, or several.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> params = {"a": jnp.ones(3), "b": jnp.ones(3)}
      >>> tx = slamb_jax.jointspar(0.1, {"a": "a", "b": "b"}, budget=1)
      >>> print(slamb_jax.layer_probabilities(tx.init(params))["a"])
      0.5
    """
    return {name: jnp.exp(log_p) for name, log_p in _find(state).log_p.items()}
