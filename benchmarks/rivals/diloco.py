"""DiLoCo: local AdamW, and an outer step along the averaged parameter change."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Sends, elements, mean, mean_sends
from slamb_jax._axes import cond


class DilocoState(NamedTuple):
    count: jax.Array
    inner: Any
    anchor: Any  # where all workers last agreed, as params
    trace: Any  # the outer momentum, as params


def diloco(
    learning_rate: optax.ScalarOrSchedule,
    axis_name: str,
    sync_every: int,
    outer_rate: float = 0.7,
    outer_momentum: float = 0.9,
) -> optax.GradientTransformation:
    r"""H local steps of AdamW, then one of Nesterov's momentum on their mean.

    At steps H, 2H, ... with a the parameters after the outer step before:

    .. math::

      \Delta &= a - \text{mean over workers of } p, \quad
      b \leftarrow \mu b + \Delta \\
      a &\leftarrow a - \eta (\Delta + \mu b), \quad p \leftarrow a

    AdamW's moments stay local. (Douillard et al., 2023,
    https://arxiv.org/abs/2311.08105.)
    """
    inner = optax.adamw(learning_rate, weight_decay=0.0)

    def init(params: Any) -> DilocoState:
        copy = jax.tree.map(jnp.array, params)
        return DilocoState(
            jnp.zeros([], jnp.int32),
            inner.init(params),
            copy,
            optax.tree.zeros_like(params),
        )

    def update(
        updates: Any, state: DilocoState, params: Any
    ) -> tuple[Any, DilocoState]:
        updates, inner_state = inner.update(updates, state.inner, params)
        count = optax.safe_increment(state.count)

        def outer(updates: Any, params: Any, anchor: Any, trace: Any) -> tuple:
            there = mean(optax.apply_updates(params, updates), axis_name)
            delta = jax.tree.map(lambda a, p: a - p, anchor, there)
            trace = jax.tree.map(lambda b, d: outer_momentum * b + d, trace, delta)
            anchor = jax.tree.map(
                lambda a, d, b: a - outer_rate * (d + outer_momentum * b),
                anchor,
                delta,
                trace,
            )
            return jax.tree.map(lambda a, p: a - p, anchor, params), anchor, trace

        def local(updates: Any, params: Any, anchor: Any, trace: Any) -> tuple:
            del params
            return updates, anchor, trace

        operands = (updates, params, state.anchor, state.trace)
        due = count % sync_every == 0
        updates, anchor, trace = cond(due, outer, local, *operands)
        return updates, DilocoState(count, inner_state, anchor, trace)

    return optax.GradientTransformation(init, update)


def diloco_sends(params: Any, workers: int, step: int, sync_every: int) -> Sends:
    """A float32 mean of all parameters every H steps."""
    due = step % sync_every == 0
    return mean_sends(elements(params), workers) if due else []
