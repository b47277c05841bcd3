"""Predicts, before a run, whether SLAMB is worth using on a given network."""

from slamb_jax.advisor.advice import Advice, StepCost
from slamb_jax.advisor.advise import advise
from slamb_jax.advisor.network import Network

__all__ = ["Advice", "Network", "StepCost", "advise"]
