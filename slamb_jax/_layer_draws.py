"""The layers that JointSpar draws, and the state it draws them from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes
from slamb_jax._distribution import update_distribution


class JointSparState(NamedTuple):
    """State of :func:`jointspar` and :func:`jointspar_lars`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    seed: jax.Array  # int32, shape []
    worker: jax.Array  # int32, shape []; 0 unless each worker draws for itself
    log_p: dict[str, jax.Array]  # of each layer, float32, shape []
    max_norm: jax.Array  # L, float32, shape []
    trace: optax.Updates  # momentum, as params


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
    return draw(_find(state))


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


def draw(state: JointSparState) -> dict[str, jax.Array]:
    """The active set of one state."""
    # Of a kind of its own: the default may be one that vmap changes.
    key = jax.random.key(state.seed, impl="threefry2x32")
    for number in (state.count, state.worker):
        key = jax.random.fold_in(key, number)
    uniform = jax.random.uniform(key, (len(state.log_p),), jnp.float32)
    names = sorted(state.log_p)
    return {
        name: x < jnp.exp(state.log_p[name])
        for name, x in zip(names, uniform, strict=True)
    }


def drawn_from(
    state: JointSparState,
    active: dict[str, jax.Array],
    norms: dict[str, jax.Array],
    own_draws_over: _axes.AxisName | None,
    **settings: Any,
) -> JointSparState:
    """The state of the next draw, after these layers had gradients of these norms."""
    names = sorted(state.log_p)
    columns = state.log_p, norms, active
    log_p, norm, drawn = (jnp.stack([x[name] for name in names]) for x in columns)
    log_p, max_norm = update_distribution(
        log_p, norm, drawn, state.max_norm, **settings
    )
    worker = state.worker
    if own_draws_over is not None:
        worker = _axes.worker_index(own_draws_over).astype(jnp.int32)
    return state._replace(
        count=optax.safe_increment(state.count),
        worker=worker,
        log_p=dict(zip(names, log_p, strict=True)),
        max_norm=max_norm,
    )


def _find(state: optax.OptState) -> JointSparState:
    def is_found(x: Any) -> bool:
        return isinstance(x, JointSparState)

    found = [x for x in jax.tree.leaves(state, is_leaf=is_found) if is_found(x)]
    if len(found) != 1:
        raise ValueError(
            "state must hold one state of slamb_jax.jointspar or jointspar_lars, got "
            f"{len(found)} in {jax.tree.structure(state)}"
        )
    return found[0]
