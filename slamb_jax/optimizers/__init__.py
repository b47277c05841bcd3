"""Optimizers, each a chain of public links."""

from slamb_jax.optimizers.adamw import adamw
from slamb_jax.optimizers.lamb import lamb
from slamb_jax.optimizers.lion import lion
from slamb_jax.optimizers.muon import muon
from slamb_jax.optimizers.sgd import sgd
from slamb_jax.optimizers.slamb import slamb

__all__ = ["adamw", "lamb", "lion", "muon", "sgd", "slamb"]
