"""Meshes of several axes, and workers whose parameters are sharded over the second."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from tests.workers import AXIS, P

N, SHARDS = 4, 2
ALONE = pytest.mark.filterwarnings("ignore:after call")


def mesh_with(sizes, kind=AxisType.Auto):
    """Axes of these names and sizes, the last one the fastest."""
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    kinds = (kind,) * len(sizes)
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=kinds)


def mesh_4x2():
    return mesh_with({AXIS: N, "model": SHARDS})


def in_shard_map(step, mesh, state, specs, check_vma):
    """A worker's step under a ``jax.shard_map`` over all axes, as users write it.

    ``specs``: of the parameters; gradients have a leading axis of devices.
    """
    of_state = jax.tree.map(lambda x: x.sharding.spec, state)
    lead = tuple(name for name in mesh.axis_names if name != "model")
    of_batch = {name: P(lead, *(spec or ())) for name, spec in specs.items()}

    def one_of_many(state, g):
        new, _ = step(jax.tree.map(lambda x: jnp.squeeze(x, 0), state), g)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), new), ()

    return jax.jit(jax.shard_map(
        one_of_many, mesh=mesh, in_specs=(of_state, of_batch),
        out_specs=(of_state, ()), check_vma=check_vma,
    ))  # fmt: skip
