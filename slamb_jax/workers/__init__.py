"""Workers on a mesh, or simulated on one device."""

from slamb_jax.workers.agreement import assert_replicas_agree as assert_replicas_agree
from slamb_jax.workers.chunks import in_chunks as in_chunks
from slamb_jax.workers.replicas import consolidate as consolidate
from slamb_jax.workers.replicas import replicate as replicate
from slamb_jax.workers.simulate import simulated_replicas as simulated_replicas
from slamb_jax.workers.simulate import simulated_step as simulated_step
from slamb_jax.workers.step import WorkersStep as WorkersStep
from slamb_jax.workers.step import per_worker_step as per_worker_step
from slamb_jax.workers.watchdog import Watchdog as Watchdog

__all__ = [
    "Watchdog",
    "WorkersStep",
    "assert_replicas_agree",
    "consolidate",
    "in_chunks",
    "per_worker_step",
    "replicate",
    "simulated_replicas",
    "simulated_step",
]
