"""Which coordinates are exchanged at a step: ``slamb_jax.selections``."""

from slamb_jax.exchange.selections import Bernoulli as Bernoulli
from slamb_jax.exchange.selections import Leaf as Leaf
from slamb_jax.exchange.selections import Permutation as Permutation
from slamb_jax.exchange.selections import Schedule as Schedule
from slamb_jax.exchange.selections import Selection as Selection
from slamb_jax.exchange.selections import Strided as Strided
from slamb_jax.exchange.selections import TopK as TopK
from slamb_jax.exchange.selections import replay_masks as replay_masks

__all__ = [
    "Bernoulli",
    "Leaf",
    "Permutation",
    "Schedule",
    "Selection",
    "Strided",
    "TopK",
    "replay_masks",
]
