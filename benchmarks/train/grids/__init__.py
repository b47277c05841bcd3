"""The grids by their names, and all methods by theirs."""

from benchmarks.train import methods
from benchmarks.train.grids import (
    different_data,
    fewer_bytes,
    frontier,
    latency,
    scale,
    slamb,
)

MODULES = frontier, slamb, fewer_bytes, different_data, latency, scale
METHODS = methods.METHODS | {
    name: method
    for module in (slamb, fewer_bytes, different_data, latency)
    for name, method in module.METHODS.items()
}
GRIDS = {name: grid for module in MODULES for name, grid in module.GRIDS.items()}
