"""The chips that a step can be compiled for without having one."""

import importlib.util
import os
from typing import Any, NamedTuple

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
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84929347584
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Chip(NamedTuple):
    """The limits of a chip."""

    memory: float  # bytes that the compiler may fill
    bandwidth: float  # bytes a second


CHIPS = {
    "TPU v5": Chip(95.74 * 2**30, 2765e9),
    "TPU v5 lite": Chip(15.75 * 2**30, 819e9),
    "NVIDIA H100 80GB HBM3": Chip(84929347584, 3352e9),
}


def mesh_of(topology: str) -> Mesh:
    """All chips of a topology on one axis.

    ``h100:1x128x8`` is one partition of 128 hosts of 8 GPUs; ``v5p:8x8x16`` a TPU's.
    """
    kind, _, shape = topology.partition(":")
    if kind == "h100":
        if importlib.util.find_spec("jax_cuda12_plugin") is None:
            raise ModuleNotFoundError("--topology h100:... needs the extra gpu-aot")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNTRIED}"
        wanted: dict[str, Any] = {"platform": "cuda", "target_config": H100}
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
