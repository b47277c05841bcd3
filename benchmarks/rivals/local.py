"""Local steps of AdamW between outer steps: DiLoCo, and what SparseLoCo has of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Rival, Sends, elements, mean, mean_sends
from slamb_jax._tree.axes import cond


class LocalState(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    inner: optax.OptState  # AdamW's; it stays local
    anchor: optax.Params  # where all workers last agreed
    outer: Any  # the outer optimizer's state


def local_adamw(
    learning_rate: optax.ScalarOrSchedule,
    sync_every: int,
    outer_init: Callable[[optax.Params], Any],
    outer_step: Callable[[optax.Params, optax.Params, Any], tuple[optax.Params, Any]],
    outer_sends: Callable[[optax.Params, int], Sends],
) -> Rival:
    """H local steps of AdamW, then ``outer_step(anchor, params, state)``.

    It returns the new anchor, from which all workers go on, and its new state.
    """
    inner = optax.adamw(learning_rate, weight_decay=0.0)

    def init(params: optax.Params) -> LocalState:
        anchor = jax.tree.map(jnp.array, params)
        count = jnp.zeros([], jnp.int32)
        return LocalState(count, inner.init(params), anchor, outer_init(params))

    def update(
        updates: optax.Updates, state: LocalState, params: optax.Params
    ) -> tuple[optax.Updates, LocalState]:
        updates, inner_state = inner.update(updates, state.inner, params)
        count = optax.safe_increment(state.count)

        def both(updates: Any, params: Any, anchor: Any, outer: Any) -> Any:
            there = optax.apply_updates(params, updates)
            anchor, outer = outer_step(anchor, there, outer)
            return jax.tree.map(jnp.subtract, anchor, params), anchor, outer

        def local(updates: Any, params: Any, anchor: Any, outer: Any) -> Any:
            return updates, anchor, outer

        operands = updates, params, state.anchor, state.outer
        updates, anchor, outer = cond(count % sync_every == 0, both, local, *operands)
        return updates, LocalState(count, inner_state, anchor, outer)

    def due(step: int) -> bool:
        return step % sync_every == 0

    return Rival(
        optax.GradientTransformation(init, update),
        lambda params, workers, t: outer_sends(params, workers) if due(t) else [],
        agreed=due,
    )


def diloco(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    sync_every: int,
    outer_rate: float = 0.7,
    outer_momentum: float = 0.9,
) -> Rival:
    r"""H local steps of AdamW, then one of Nesterov's momentum on their mean.

    At steps H, 2H, ... with a the parameters after the outer step before:

    .. math::

      \Delta &= a - \text{mean over workers of } p, \quad
      b \leftarrow \mu b + \Delta \\
      a &\leftarrow a - \eta (\Delta + \mu b), \quad p \leftarrow a

    (Douillard et al., 2023, https://arxiv.org/abs/2311.08105.)
    """
    nesterov = optax.sgd(outer_rate, outer_momentum, nesterov=True)

    def outer(anchor: Any, params: Any, state: Any) -> tuple[Any, Any]:
        delta = jax.tree.map(jnp.subtract, anchor, mean(params, axis_name))
        updates, state = nesterov.update(delta, state)
        return optax.apply_updates(anchor, updates), state

    def sends(params: optax.Params, workers: int) -> Sends:
        return mean_sends(elements(params), workers)

    return local_adamw(learning_rate, sync_every, nesterov.init, outer, sends)
