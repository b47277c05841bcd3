"""Optimizers, each a chain of public links."""

from slamb_jax.optimizers.adamw import adamw as adamw
from slamb_jax.optimizers.lamb import lamb as lamb
from slamb_jax.optimizers.lion import lion as lion
from slamb_jax.optimizers.muon import muon as muon
from slamb_jax.optimizers.sgd import sgd as sgd
from slamb_jax.optimizers.slamb import slamb as slamb
