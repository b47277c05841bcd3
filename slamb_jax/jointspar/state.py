"""The state of JointSpar, and the layers drawn from it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax


class JointSparState(NamedTuple):
    """State of :func:`jointspar` and :func:`jointspar_lars`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    seed: jax.Array  # int32, shape []
    worker: jax.Array  # int32, shape []; 0 unless each worker draws for itself
    log_p: dict[str, jax.Array]  # of each layer, float32, shape []
    max_norm: jax.Array  # L, float32, shape []
    trace: optax.Updates  # momentum, as params


def active_layers(state: optax.OptState) -> dict[str, jax.Array]:
    r"""Draws the layers to train at the next step.

    :math:`Z_d \sim \operatorname{Bernoulli}(p_d)` for each layer d. Ask before the
    gradient is computed: ``update`` of the same state will draw the same layers.

    Args:
      state: a state that contains one of :func:`jointspar` or :func:`jointspar_lars`.

    Returns:
      For each label a bool array of shape ().

    Raises:
      ValueError: if ``state`` contains none, or several.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import jointspar
      >>> params = {"a": jnp.ones(3), "b": jnp.ones(3), "c": jnp.ones(3)}
      >>> tx = jointspar.jointspar(0.1, {"a": "a", "b": "b", "c": None}, budget=2)
      >>> active = jointspar.active_layers(tx.init(params))
      >>> sorted(active), bool(active["a"])  # s = D: all layers at every step
      (['a', 'b'], True)
    """
    return draw(_find(state))


def layer_probabilities(state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the probability of each layer to be active at the next step.

    Args:
      state: as for :func:`active_layers`.

    Returns:
      For each label a float32 array of shape (); they add up to the budget.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import jointspar
      >>> params = {"a": jnp.ones(3), "b": jnp.ones(3)}
      >>> tx = jointspar.jointspar(0.1, {"a": "a", "b": "b"}, budget=1)
      >>> print(jointspar.layer_probabilities(tx.init(params))["a"])
      0.5
    """
    return {name: jnp.exp(log_p) for name, log_p in _find(state).log_p.items()}


def draw(state: JointSparState) -> dict[str, jax.Array]:
    """The layers drawn from one state."""
    # vmap and a user's configuration may change the default generator, not this one.
    key = jax.random.key(state.seed, impl="threefry2x32")
    for number in (state.count, state.worker):
        key = jax.random.fold_in(key, number)
    uniform = jax.random.uniform(key, (len(state.log_p),), jnp.float32)
    names = sorted(state.log_p)
    return {
        name: x < jnp.exp(state.log_p[name])
        for name, x in zip(names, uniform, strict=True)
    }


def _find(state: optax.OptState) -> JointSparState:
    def is_found(x: object) -> bool:
        return isinstance(x, JointSparState)

    found = [x for x in jax.tree.leaves(state, is_leaf=is_found) if is_found(x)]
    if len(found) != 1:
        raise ValueError(
            "state must contain one state of jointspar or jointspar_lars, got "
            f"{len(found)} in {jax.tree.structure(state)}"
        )
    return found[0]
