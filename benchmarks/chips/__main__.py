"""Compiles optimizer steps for chips that are not there.

Run from the root of the repository, on any machine, with the extra ``gpu-aot`` or
``tpu-aot``: ``python -m benchmarks.chips --topology h100:1x1x8``. Update and apply, one
worker a chip, float32 state, compiled for the whole topology: memory of a chip, what
its kernels move, bytes sent. Large models take minutes. ``slamb-jax advise`` predicts
the seconds of such chips as workers on slower links.
"""

import dataclasses
from typing import Literal

import jax
import tyro
from rich.console import Console

from benchmarks.chips.program import OPTIMIZERS, Step, compile_step
from benchmarks.chips.targets import mesh_of
from benchmarks.rivals import elements
from benchmarks.shapes import MODELS, abstract
from examples.common.options import check_names
from examples.common.tables import table
from examples.hardware import hardware


@dataclasses.dataclass(frozen=True)
class Config:
    """The steps to compile."""

    model: Literal[tuple(MODELS)] = "layers"  # type: ignore[valid-type]
    """layers: four matrices of 1024 x 4096, with biases"""
    topology: str = "h100:1x1x8"
    """or h100:1x128x8, v5p:8x8x16, ..."""
    only: tuple[str, ...] = tuple(OPTIMIZERS)
    """steps by their names in the table"""


def cells(name: str, step: Step) -> dict[str, str]:
    """The row of an optimizer."""
    sent = [step.report.bytes_sent(conditional=average) for average in (False, True)]
    return {
        "": name,
        "compile s": f"{step.seconds_to_compile:.0f}",
        "p, g, state / p": f"{step.state_bytes / step.parameter_bytes:.2f}",
        "temporary / p": f"{step.temporary_bytes / step.parameter_bytes:.2f}",
        "passes": f"{step.traffic.bytes / step.parameter_bytes:.1f}",
        "kernels": f"{step.traffic.kernels}",
        "conditionals": f"{step.traffic.conditionals}",
        "MB a step": f"{sent[0] / 1e6:.1f}",
        "MB an average": f"{sent[1] / 1e6:.1f}",
    }


def main(config: Config) -> None:
    jax.config.update("jax_platforms", "cpu")
    check_names("--only", config.only, OPTIMIZERS)
    console, rows = Console(width=140), []
    shapes, mesh = MODELS[config.model], mesh_of(config.topology)
    for name in config.only:
        console.print(f"compiling {name}", highlight=False)
        try:
            rows.append(cells(name, compile_step(name, shapes, mesh)))
        except jax.errors.JaxRuntimeError as error:
            console.print(f"{name} does not compile: {str(error)[:1500]}")
    size = (
        f"{elements(abstract(shapes)) / 1e6:.1f} M parameters in {len(shapes)} leaves"
    )
    title = f"{config.model}, {size}; {config.topology}, {mesh.size} chips"
    if rows:
        console.print(table(title, rows, f"compiled on {hardware(jax.devices()[0])}"))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
