"""The grids by their names, and all methods by theirs."""

from benchmarks.train import methods
from benchmarks.train.grids import (
    different_data,
    fewer_bytes,
    frontier,
    routes,
    scale,
    slamb,
)

MODULES = frontier, slamb, fewer_bytes, different_data, scale
WITH_METHODS = methods, slamb, fewer_bytes, different_data, routes
METHODS = {name: x for module in WITH_METHODS for name, x in module.METHODS.items()}
GRIDS = {name: grid for module in MODULES for name, grid in module.GRIDS.items()}
