"""Transformations that wrap an optimizer."""

from slamb_jax.wrappers.accumulate import AccumulateState as AccumulateState
from slamb_jax.wrappers.accumulate import accumulate as accumulate
from slamb_jax.wrappers.bfloat16 import TrainInBfloat16State as TrainInBfloat16State
from slamb_jax.wrappers.bfloat16 import train_in_bfloat16 as train_in_bfloat16
from slamb_jax.wrappers.finite import SkipNotFiniteState as SkipNotFiniteState
from slamb_jax.wrappers.finite import check_finite as check_finite
from slamb_jax.wrappers.finite import skip_not_finite as skip_not_finite

__all__ = [
    "AccumulateState",
    "SkipNotFiniteState",
    "TrainInBfloat16State",
    "accumulate",
    "check_finite",
    "skip_not_finite",
    "train_in_bfloat16",
]
