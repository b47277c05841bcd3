"""Which coordinates are exchanged at a step: ``slamb_jax.selections``."""

from slamb_jax._ex.selections import (
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
