"""Transformations that wrap an optimizer."""

from slamb_jax.wrappers.accumulate import AccumulateState, accumulate
from slamb_jax.wrappers.bfloat16 import TrainInBfloat16State, train_in_bfloat16
from slamb_jax.wrappers.finite import SkipNotFiniteState, check_finite, skip_not_finite

__all__ = [
    "AccumulateState",
    "SkipNotFiniteState",
    "TrainInBfloat16State",
    "accumulate",
    "check_finite",
    "skip_not_finite",
    "train_in_bfloat16",
]
