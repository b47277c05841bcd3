"""Predicts, before a run, whether an exchange is worth using on a network."""

from slamb_jax.advisor.advice import Advice as Advice
from slamb_jax.advisor.advice import Recorded as Recorded
from slamb_jax.advisor.advice import StepCost as StepCost
from slamb_jax.advisor.advise import advise as advise
from slamb_jax.advisor.network import Network as Network
