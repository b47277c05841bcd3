"""The grids by their names, and all methods by theirs."""

from benchmarks.train import methods
from benchmarks.train.grids import different_data, fewer_bytes, frontier, scale, slamb

MODULES = frontier, slamb, fewer_bytes, different_data, scale
METHODS = methods.METHODS | slamb.METHODS | fewer_bytes.METHODS | different_data.METHODS
GRIDS = {name: grid for module in MODULES for name, grid in module.GRIDS.items()}
