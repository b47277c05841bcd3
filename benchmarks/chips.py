"""Compiles the optimizer step for a thousand chips that are not there.

Run from the root of the repository, on any machine, with the extra ``tpu-aot``:
``python -m benchmarks.chips --model bert-large --topology v5p:8x8x16``. It takes
minutes. Update and apply of SLAMB and of dense LAMB, one worker a chip, float32 state,
compiled for the whole topology: memory of a chip, bytes sent by kind of link. Then the
advisor's step times where those chips are workers in nodes on slower links.
"""

import dataclasses
import itertools
import os
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import slamb_jax
from benchmarks.rivals import elements
from benchmarks.shapes import MODELS, Shapes, abstract
from examples.common.optimizers import dense
from examples.common.tables import table
from examples.hardware import hardware

AXIS = "data"
EXCHANGE = slamb_jax.Exchange.paper(AXIS)
WITHOUT_TPU = {  # what libtpu asks of its surroundings
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}
# Bytes that a chip's compiler fills, and bytes per second of its memory.
MEMORY = {"TPU v5": 95.74 * 2**30, "TPU v5 lite": 15.75 * 2**30}
BANDWIDTH = {"TPU v5": 2765e9, "TPU v5 lite": 819e9}
OPTIMIZERS = {
    "lamb": dense(optax.lamb(1e-3), AXIS),
    "slamb": slamb_jax.slamb(1e-3, EXCHANGE),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile, and the cluster of the prediction."""

    model: Literal["resnet-110", "bert-base", "bert-large", "bert-xl"] = "bert-large"
    topology: str = "v5p:8x8x16"
    slices: int = 1
    tokens: int = 32 * 128
    """Tokens of a worker's batch; compute is taken as 6 FLOP for each and parameter."""
    flops: float = 0.4 * 312e12
    """FLOP per second of a worker: 40 % of an A100's bfloat16 peak."""
    workers_per_node: int = 8
    links: tuple[float, ...] = (10e9, 100e9, 400e9)
    """Bits per second of a node's link."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One compiled step, per chip."""

    seconds_to_compile: float
    state_bytes: int
    temporary_bytes: int
    accessed_bytes: float
    report: slamb_jax.WireReport

    def sent(self, *, between_slices: bool, conditional: bool) -> float:
        chosen = (
            c for c in self.report.collectives if c.between_slices == between_slices
        )
        report = slamb_jax.WireReport(tuple(chosen))
        return report.bytes_sent(conditional=conditional)


def mesh_of(topology: str, slices: int = 1) -> Mesh:
    """All chips of a topology on one axis, slice after slice."""
    os.environ |= WITHOUT_TPU | os.environ
    several = {"num_slices": slices} if slices > 1 else {}
    description = topologies.get_topology_desc(topology, "tpu", **several)
    return Mesh(np.array(description.devices), (AXIS,))


def compile_step(name: str, shapes: Shapes, mesh: Mesh) -> Step:
    """Update and apply, each worker with its own gradients, parameters and moments."""
    tx = OPTIMIZERS[name]

    def step(state: Any, grads: Any) -> tuple[Any, Any]:
        params, opt_state = state
        grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    def on_chips(x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(AXIS))
        return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding)

    params = abstract(shapes)
    state = params, jax.eval_shape(tx.init, params)
    run = slamb_jax.per_worker_step(step, mesh, EXCHANGE, check_vma=name == "slamb")
    start = time.perf_counter()
    compiled: Any = run.lower(*jax.tree.map(on_chips, (state, params))).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Step(
        seconds_to_compile=seconds,
        state_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        accessed_bytes=compiled.cost_analysis()["bytes accessed"],
        report=slamb_jax.wire_report(compiled),
    )


def compiled_table(steps: dict[str, Step], chip: str, title: str) -> Table:
    rows = []
    for name, step in steps.items():
        share = (step.state_bytes + step.temporary_bytes) / MEMORY[chip]
        row = {
            "": name,
            "compile s": f"{step.seconds_to_compile:.0f}",
            "p, m, v, g GB": f"{step.state_bytes / 1e9:.2f}",
            "temporary GB": f"{step.temporary_bytes / 1e9:.2f}",
            "of memory": f"{share:.0%}",
        }
        for average, between in itertools.product((False, True), repeat=2):
            sent = step.sent(between_slices=between, conditional=average)
            when, link = (
                "average" if average else "step",
                "network" if between else "slice",
            )
            row[f"{when}: {link} MB"] = f"{sent / 1e6:.1f}"
        rows.append(row | {"accessed GB": f"{step.accessed_bytes / 1e9:.1f}"})
    return table(title, rows, f"compiled on {hardware(jax.devices()[0])}")


def predicted_table(
    updates: tuple[float, float], shapes: Shapes, workers: int, config: Config
) -> Table:
    """What the advisor predicts for these chips as workers on slower links."""
    params, nodes = abstract(shapes), config.workers_per_node
    compute = 6 * elements(params) * config.tokens / config.flops
    rows = []
    for link in config.links:
        network = slamb_jax.Network(workers, link, workers_per_node=nodes)
        advice = slamb_jax.advise(
            params, network, EXCHANGE, step_seconds=compute, update_seconds=updates
        )
        costs = {
            "LAMB, float32": advice.dense,
            "LAMB, bfloat16": advice.dense_bfloat16,
            "SLAMB": advice.exchanging,
        }
        row = {"link": f"{link / 1e9:.0f} Gbit/s"}
        for name, cost in costs.items():
            cell = f"{1e3 * cost.step_seconds:.0f}, {cost.efficiency:.0%}"
            row[f"{name}: ms, efficiency"] = cell
        both = f"{advice.speedup:.2f}, {advice.speedup_bfloat16:.2f}"
        rows.append(row | {"speed-up, of both": both})
    lamb, slamb = (f"{1e3 * update:.1f} ms" for update in updates)
    return table(
        f"{workers} workers, {nodes} a node: compute {1e3 * compute:.0f} ms "
        f"({config.tokens} tokens), update of LAMB {lamb}, of SLAMB {slamb}",
        rows,
        "efficiency: share of the step that is not exchange. The paper reports 90 % "
        "(2.8 B parameters, 1,024 A100, links not stated)",
    )


def main(config: Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    console, shapes = Console(width=140), MODELS[config.model]
    mesh = mesh_of(config.topology, config.slices)
    chip = mesh.devices.flat[0].device_kind
    steps: dict[str, Step] = {}
    for name in OPTIMIZERS:
        try:
            steps[name] = compile_step(name, shapes, mesh)
        except jax.errors.JaxRuntimeError as error:
            console.print(f"{name} does not compile: {str(error)[:1500]}")
    if steps:
        millions = elements(abstract(shapes)) / 1e6
        title = (
            f"{config.model}, {millions:.1f} M parameters in {len(shapes)} leaves; "
            f"{config.slices} x {config.topology}, {mesh.size} chips"
        )
        console.print(compiled_table(steps, chip, title))
    if len(steps) == len(OPTIMIZERS):
        # The bytes that the compiler says an update accesses, at the chip's rate.
        lamb, slamb = (s.accessed_bytes / BANDWIDTH[chip] for s in steps.values())
        console.print(predicted_table((lamb, slamb), shapes, mesh.size, config))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
