"""Local steps of AdamW between outer steps: what DiLoCo and SparseLoCo share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._tree.axes import cond

Outer = Callable[[optax.Params, optax.Params, Any], tuple[optax.Params, Any]]


class LocalState(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    inner: optax.OptState  # AdamW's; it stays local
    anchor: optax.Params  # where all workers last agreed
    outer: Any  # the outer optimizer's state


def local_adamw(
    learning_rate: optax.ScalarOrSchedule,
    sync_every: int,
    outer_init: Callable[[optax.Params], Any],
    outer_step: Outer,
) -> optax.GradientTransformation:
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
            return jax.tree.map(lambda a, p: a - p, anchor, params), anchor, outer

        def local(updates: Any, params: Any, anchor: Any, outer: Any) -> Any:
            del params
            return updates, anchor, outer

        operands = updates, params, state.anchor, state.outer
        updates, anchor, outer = cond(count % sync_every == 0, both, local, *operands)
        return updates, LocalState(count, inner_state, anchor, outer)

    return optax.GradientTransformation(init, update)
