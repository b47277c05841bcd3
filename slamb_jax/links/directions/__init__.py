"""What an optimizer does with an exchanged momentum."""

from slamb_jax.links.directions.adam import AdamState, adam
from slamb_jax.links.directions.lion import lion
from slamb_jax.links.directions.muon import DimensionNumbers, muon

__all__ = ["AdamState", "DimensionNumbers", "adam", "lion", "muon"]
