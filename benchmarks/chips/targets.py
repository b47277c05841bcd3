"""The chips that a step can be compiled for without having one."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"
WITHOUT_TPU = {  # the environment that libtpu asks for
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}
UNTRIED = "--xla_gpu_autotune_level=0"  # no kernel can be tried out where no GPU is
H100 = Path(__file__).with_name("h100.pbtxt")  # as XLA describes it


def mesh_of(topology: str) -> Mesh:
    """All chips of a topology on one axis.

    ``h100:1x128x8`` is one partition of 128 hosts of 8 GPUs; ``v5p:8x8x16`` a TPU's.
    """
    kind, _, shape = topology.partition(":")
    if kind == "h100":
        if importlib.util.find_spec("jax_cuda12_plugin") is None:
            raise ModuleNotFoundError("--topology h100:... needs the extra gpu-aot")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNTRIED}"
        wanted: dict[str, Any] = {"platform": "cuda", "target_config": H100.read_text()}
        description = topologies.get_topology_desc(topology=shape, **wanted)
    else:
        os.environ |= WITHOUT_TPU | os.environ
        description = topologies.get_topology_desc(topology, "tpu")
    return Mesh(np.array(description.devices), (AXIS,))


def on_chips(tree: Any, mesh: Mesh) -> Any:
    """Shapes of the tree with a leading axis of workers, one for each chip."""
    there = NamedSharding(mesh, PartitionSpec(AXIS))

    def replicated(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=there)

    return jax.tree.map(replicated, tree)
