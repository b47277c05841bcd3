"""DiLoCo: local AdamW, and an outer step along the averaged parameter change."""

from typing import Any

import jax
import optax

from benchmarks.rivals.exchange import Rival, Sends, elements, mean, mean_sends
from benchmarks.rivals.local import local_adamw


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
    mu, eta = outer_momentum, outer_rate

    def outer(anchor: Any, params: Any, trace: Any) -> tuple[Any, Any]:
        there = mean(params, axis_name)
        delta = jax.tree.map(lambda a, p: a - p, anchor, there)
        trace = jax.tree.map(lambda b, d: mu * b + d, trace, delta)
        step = jax.tree.map(lambda d, b: eta * (d + mu * b), delta, trace)
        return jax.tree.map(lambda a, s: a - s, anchor, step), trace

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        due = step % sync_every == 0
        return mean_sends(elements(params), workers) if due else []

    tx = local_adamw(learning_rate, sync_every, optax.tree.zeros_like, outer)
    return Rival(tx, sends, agreed=lambda step: step % sync_every == 0)
