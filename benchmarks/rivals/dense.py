"""The baselines: an optax optimizer on gradients averaged over the workers."""

import optax

from benchmarks.rivals.exchange import Rival, elements, mean_sends
from examples.common import optimizers


def dense(optimizer: optax.GradientTransformation, axis_name: str) -> Rival:
    """``optimizer`` on mean gradients, in float32."""
    return Rival(
        optimizers.dense(optimizer, axis_name),
        lambda params, workers, _: mean_sends(elements(params), workers),
    )
