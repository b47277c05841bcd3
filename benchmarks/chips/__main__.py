"""Compiles optimizer steps for chips that are not there.

Run from the root of the repository, on any machine, with the extra ``gpu-aot`` or
``tpu-aot``: ``python -m benchmarks.chips --topology h100:1x1x8``. Update and apply, one
worker a chip, float32 state, compiled for the whole topology: memory of a chip, what
its kernels move, bytes sent. With ``--links`` the advisor's step times follow, where
those chips are workers in nodes on slower links. Large models take minutes.
"""

import dataclasses
from typing import Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

import slamb_jax
from benchmarks.chips.program import DEFAULT, OPTIMIZERS, Step, compile_step
from benchmarks.chips.targets import CHIPS, mesh_of
from benchmarks.rivals import elements
from benchmarks.shapes import MODELS, Shapes, abstract
from examples.common.options import check_names
from examples.common.tables import table
from examples.hardware import hardware

LAYERS: Shapes = {f"{i}/kernel": (1024, 4096) for i in range(4)}
LAYERS |= {f"{i}/bias": (4096,) for i in range(4)}
COMPARED = "optax.adamw", "adamw"  # that the advisor compares


@dataclasses.dataclass(frozen=True)
class Config:
    """The steps to compile, and the cluster of the prediction."""

    model: Literal["layers", "resnet-110", "bert-base", "bert-large", "bert-xl"] = (
        "layers"
    )
    """layers: four matrices of 1024 x 4096, with biases"""
    topology: str = "h100:1x1x8"
    """or h100:1x128x8, v5p:8x8x16, ..."""
    only: tuple[str, ...] = tuple(OPTIMIZERS)
    """steps by their names in the table"""
    links: tuple[float, ...] = ()
    """bits per second of a node's link, for the prediction"""
    tokens: int = 32 * 128
    """of a worker's batch; compute is taken as 6 FLOP for each and parameter"""
    flops: float = 0.4 * 312e12
    """FLOP per second of a worker: 40 % of an A100's bfloat16 peak"""
    workers_per_node: int = 8


def compiled_table(steps: dict[str, Step], title: str) -> Table:
    rows = []
    for name, step in steps.items():
        row = {
            "": name,
            "compile s": f"{step.seconds_to_compile:.0f}",
            "p, g, state / p": f"{step.state_bytes / step.parameter_bytes:.2f}",
            "temporary / p": f"{step.temporary_bytes / step.parameter_bytes:.2f}",
            "passes": f"{step.traffic.bytes / step.parameter_bytes:.1f}",
            "kernels": f"{step.traffic.kernels}",
            "conditionals": f"{step.traffic.conditionals}",
        }
        for average, when in ((False, "a step"), (True, "an average")):
            sent = step.report.bytes_sent(conditional=average)
            row[f"MB {when}"] = f"{sent / 1e6:.1f}"
        rows.append(row)
    return table(title, rows, f"compiled on {hardware(jax.devices()[0])}")


def predicted_table(
    updates: tuple[float, float], shapes: Shapes, workers: int, config: Config
) -> Table:
    """The advisor's prediction for these chips as workers on slower links."""
    params, nodes = abstract(shapes), config.workers_per_node
    compute = 6 * elements(params) * config.tokens / config.flops
    rows = []
    for link in config.links:
        network = slamb_jax.Network(workers, link, workers_per_node=nodes)
        advice = slamb_jax.advise(
            params, network, DEFAULT, step_seconds=compute, update_seconds=updates
        )
        costs = {
            "dense, float32": advice.dense,
            "dense, bfloat16": advice.dense_bfloat16,
            "adamw": advice.exchanging,
        }
        row = {"link": f"{link / 1e9:.0f} Gbit/s"}
        for name, cost in costs.items():
            cell = f"{1e3 * cost.step_seconds:.0f}, {cost.efficiency:.0%}"
            row[f"{name}: ms, efficiency"] = cell
        both = f"{advice.speedup:.2f}, {advice.speedup_bfloat16:.2f}"
        rows.append(row | {"speed-up, of both": both})
    dense, ours = (f"{1e3 * update:.1f} ms" for update in updates)
    return table(
        f"{workers} workers, {nodes} a node: compute {1e3 * compute:.0f} ms "
        f"({config.tokens} tokens), update of optax.adamw {dense}, of adamw {ours}",
        rows,
        "efficiency: share of the step that is not exchange. The paper reports 90 % "
        "(2.8 B parameters, 1,024 A100, links not stated)",
    )


def main(config: Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    check_names("--only", config.only, OPTIMIZERS)
    console = Console(width=140)
    shapes = LAYERS if config.model == "layers" else MODELS[config.model]
    mesh = mesh_of(config.topology)
    steps: dict[str, Step] = {}
    for name in config.only:
        console.print(f"compiling {name}", highlight=False)
        try:
            steps[name] = compile_step(name, shapes, mesh)
        except jax.errors.JaxRuntimeError as error:
            console.print(f"{name} does not compile: {str(error)[:1500]}")
    if steps:
        millions = elements(abstract(shapes)) / 1e6
        title = (
            f"{config.model}, {millions:.1f} M parameters in {len(shapes)} leaves; "
            f"{config.topology}, {mesh.size} chips"
        )
        console.print(compiled_table(steps, title))
    if config.links and set(COMPARED) <= set(steps):
        chip = CHIPS[mesh.devices.flat[0].device_kind]
        dense, ours = (steps[n].traffic.bytes / chip.bandwidth for n in COMPARED)
        console.print(predicted_table((dense, ours), shapes, mesh.size, config))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
