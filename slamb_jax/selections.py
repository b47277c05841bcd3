"""Which coordinates are exchanged at a step: ``slamb_jax.selections``."""

from slamb_jax.exchange.selections import (
    Bernoulli,
    Leaf,
    Permutation,
    Schedule,
    Selection,
    Strided,
    replay_masks,
)

__all__ = [
    "Bernoulli",
    "Leaf",
    "Permutation",
    "Schedule",
    "Selection",
    "Strided",
    "replay_masks",
]
