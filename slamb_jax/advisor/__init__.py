"""Predicts, before a run, whether an exchange is worth using on a network."""

from slamb_jax.advisor.advice import Advice, Recorded, StepCost
from slamb_jax.advisor.advise import advise
from slamb_jax.advisor.network import Network

__all__ = ["Advice", "Network", "Recorded", "StepCost", "advise"]
