"""Compiles the optimizer step for a thousand chips that are not there.

Run from the root of the repository, on any machine, with the extra ``tpu-aot``:
``python -m benchmarks.chips --model bert-large --topology v5p:8x8x16``. It takes
minutes. Update and apply of SLAMB and of dense LAMB, one worker a chip, float32 state,
compiled for the whole topology: memory of a chip, bytes on the wire by kind of link.
Then the advisor's step times where those chips are workers in nodes on slower links.
"""

import dataclasses
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
from benchmarks.shapes import MODELS, Shapes
from examples.hardware import hardware

AXIS = "data"
WITHOUT_TPU = {  # what libtpu asks of its surroundings
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}
MEMORY = {  # bytes of a chip that its compiler fills
    "TPU v5": 95.74 * 2**30,
    "TPU v5 lite": 15.75 * 2**30,
}
BANDWIDTH = {"TPU v5": 2765e9, "TPU v5 lite": 819e9}  # bytes per second of it


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile, and the cluster of the prediction."""

    model: Literal["resnet-110", "bert-base", "bert-large", "bert-xl"] = "bert-large"
    topology: str = "v5p:8x8x16"
    slices: int = 1
    optimizers: tuple[Literal["lamb", "slamb"], ...] = ("lamb", "slamb")
    tokens: int = 32 * 128
    """Tokens of a worker's batch; compute is taken as 6 FLOP for each and parameter."""
    flops: float = 0.4 * 312e12
    """FLOP per second of a worker: 40 % of an A100's bfloat16 peak."""
    workers_per_node: int = 8
    optimizer_seconds: tuple[float, float] | None = None
    """Updates of LAMB and of SLAMB; None: their bytes accessed at the chip's rate."""
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
        chosen = [
            c
            for c in self.report.collectives
            if (c.between_slices, c.conditional) == (between_slices, conditional)
        ]
        return slamb_jax.WireReport(tuple(chosen)).bytes_sent(conditional=conditional)


def mesh_of(topology: str, slices: int = 1) -> Mesh:
    """All chips of a topology on one axis, slice after slice."""
    os.environ |= WITHOUT_TPU | os.environ
    asked = {"num_slices": slices} if slices > 1 else {}
    description = topologies.get_topology_desc(topology, "tpu", **asked)
    return Mesh(np.array(description.devices), (AXIS,))


def optimizer(name: str) -> optax.GradientTransformation:
    if name == "slamb":
        return slamb_jax.slamb(1e-3, axis_name=AXIS)
    mean = optax.stateless(lambda g, _: slamb_jax.average_parameters(g, AXIS))
    return optax.chain(mean, optax.lamb(1e-3))


def compile_step(name: str, shapes: Shapes, mesh: Mesh) -> Step:
    """Update and apply, each worker with its own gradients, parameters and moments."""
    tx = optimizer(name)

    def step(state: Any, grads: Any) -> tuple[Any, Any]:
        params, opt_state = state
        grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    def of_all(tree: Any) -> Any:
        there = NamedSharding(mesh, PartitionSpec(AXIS))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (mesh.size, *x.shape), x.dtype, sharding=there
            ),
            tree,
        )

    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    state = params, jax.eval_shape(tx.init, params)
    run = slamb_jax.per_worker_step(step, mesh, AXIS, check_vma=name == "slamb")
    start = time.perf_counter()
    compiled = run.lower(of_all(state), of_all(params)).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Step(
        seconds_to_compile=seconds,
        state_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        accessed_bytes=compiled.cost_analysis()["bytes accessed"],
        report=slamb_jax.wire_report(compiled),
    )


def compiled_table(steps: dict[str, Step], mesh: Mesh, title: str) -> Table:
    chip = mesh.devices.flat[0].device_kind
    table = Table(title=title, caption=f"compiled on {hardware(jax.devices()[0])}")
    heads = ("", "compile s", "p, m, v, g GB", "temporary GB", "of memory")
    wires = [("step", False), ("average", True)]
    links = [("slice", False), ("network", True)]
    wire_heads = [f"{w}: {link} MB" for w, _ in wires for link, _ in links]
    for head in (*heads, *wire_heads, "accessed GB"):
        table.add_column(head, justify="right" if head else "left")
    for name, step in steps.items():
        whole = (step.state_bytes + step.temporary_bytes) / MEMORY[chip]
        table.add_row(
            name,
            f"{step.seconds_to_compile:.0f}",
            f"{step.state_bytes / 1e9:.2f}",
            f"{step.temporary_bytes / 1e9:.2f}",
            f"{whole:.0%}",
            *(
                f"{step.sent(between_slices=b, conditional=c) / 1e6:.1f}"
                for _, c in wires
                for _, b in links
            ),
            f"{step.accessed_bytes / 1e9:.1f}",
        )
    return table


def predicted_table(
    updates: tuple[float, float], shapes: Shapes, mesh: Mesh, config: Config
) -> Table:
    """What the advisor says of these chips as workers on slower links."""
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    d = sum(x.size for x in params.values())
    compute = 6 * d * config.tokens / config.flops
    table = Table(
        title=f"{mesh.size} workers, {config.workers_per_node} a node: compute "
        f"{1e3 * compute:.0f} ms ({config.tokens} tokens), update of LAMB "
        f"{1e3 * updates[0]:.1f} ms, of SLAMB {1e3 * updates[1]:.1f} ms",
        caption="efficiency: share of the step that is not exchange. On record: 90 % "
        "(2.8 B parameters, 1,024 A100, links not stated)",
    )
    heads = ("LAMB, float32", "LAMB, bfloat16", "SLAMB")
    for head in ("link", *(f"{h}: ms, efficiency" for h in heads), "speed-up, of both"):
        table.add_column(head, justify="right")
    for link in config.links:
        network = slamb_jax.Network(
            mesh.size, link, workers_per_node=config.workers_per_node
        )
        advice = slamb_jax.advise(
            params, network, step_seconds=compute, optimizer_seconds=updates
        )
        table.add_row(
            f"{link / 1e9:.0f} Gbit/s",
            *(
                f"{1e3 * cost.step_seconds:.0f}, {cost.efficiency:.0%}"
                for cost in (advice.lamb, advice.lamb_bfloat16, advice.slamb)
            ),
            f"{advice.speedup:.2f}, {advice.speedup_bfloat16:.2f}",
        )
    return table


def main(config: Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    console, shapes = Console(width=140), MODELS[config.model]
    mesh = mesh_of(config.topology, config.slices)
    size = sum(int(np.prod(s)) for s in shapes.values())
    title = (
        f"{config.model}, {size / 1e6:.1f} M parameters in {len(shapes)} leaves; "
        f"{config.slices} x {config.topology}, {mesh.size} chips"
    )
    steps: dict[str, Step] = {}
    for name in config.optimizers:
        try:
            steps[name] = compile_step(name, shapes, mesh)
        except jax.errors.JaxRuntimeError as error:
            console.print(f"{name} does not compile: {str(error)[:1500]}")
    if steps:
        console.print(compiled_table(steps, mesh, title))
    updates = config.optimizer_seconds
    if updates is None and len(steps) == 2:
        rate = BANDWIDTH[mesh.devices.flat[0].device_kind]
        lamb, slamb = (steps[name].accessed_bytes for name in ("lamb", "slamb"))
        updates = lamb / rate, slamb / rate
    if updates is not None:
        console.print(predicted_table(updates, shapes, mesh, config))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
