"""Loss against bytes: a byte-level transformer on real text, 8 simulated workers.

Run from the root of the repository: ``python -m examples.byte_lm.main``. It trains on
the source code of the Python standard library, or on ``--files`` of yours, with dense
AdamW and LAMB, with SLAMB as published, and with AdamW in few bytes, on the same
batches; it prints a table, and writes a picture and its figures to ``--out``.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import matplotlib
import tyro
from jax.sharding import Mesh
from rich.console import Console

from examples.byte_lm import data
from examples.byte_lm.methods import METHODS, method, traffic
from examples.byte_lm.model import ByteLM, task
from examples.common import processes
from examples.common.options import HELP, exchange_settings
from examples.common.simulated import Program, Run, Task, evaluation_steps, train
from examples.common.tables import table
from examples.hardware import hardware


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the job, which the rates in methods.py suit."""

    optimizer: tuple[str, ...] = tuple(METHODS)[:4]
    """Train with these, one after the other; shares of bytes are of the first's.
    methods.py has all."""
    rate: tuple[float, ...] = ()
    """Peak learning rates, one for each optimizer; without, those in methods.py."""
    workers: int = 8
    steps: int = 400
    batch: int = 8
    """Sequences per worker and step."""
    context: int = 64
    """Bytes per sequence."""
    layers: int = 2
    width: int = 64
    heads: int = 4
    evaluations: int = 10
    eval_batch: int = 512
    """Sequences that are held out."""
    seed: int = 0
    files: tuple[Path, ...] = ()
    """Train on these instead of the standard library."""
    out: Path = Path("runs/byte_lm")

    def __post_init__(self) -> None:
        counts = ("workers", "steps", "batch", "context", "layers", "width", "heads")
        for name in (*counts, "evaluations", "eval_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer from 1, got {value!r}")
        for name in self.optimizer:
            method(name, {})  # raises if there is none
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads, got {self.width} and {self.heads}"
            )
        if self.rate and len(self.rate) != len(self.optimizer):
            raise ValueError(
                f"rate must have one value for each of {len(self.optimizer)} "
                f"optimizers, got {self.rate}"
            )
        for value in self.rate:
            if not 0 <= value < math.inf:
                raise ValueError(f"rate must be finite and not negative, got {value!r}")


def job(config: Config) -> Task:
    """The model and its text."""
    files = data.text_files(config.files) if config.files else data.standard_library()
    text, held_out = data.load(files, config.context)
    sizes = f"{len(text):,} bytes to train on, {len(held_out):,} held out"
    print(f"{sizes}, from {len(files):,} files")
    model = ByteLM(config.layers, config.width, config.heads, config.context)
    return task(model, text, held_out, config.eval_batch)


def run(
    name: str, rate: float, task: Task, config: Config, mesh: Mesh, settings: Any
) -> Run:
    """Trains with one optimizer; its exchange, if any, takes ``settings``."""
    chosen = method(name, settings)
    params = jax.eval_shape(task.init, jax.random.key(0))
    program = Program(
        task, chosen, workers=config.workers, batch=config.batch, steps=config.steps
    )
    due = evaluation_steps(config.steps, config.evaluations)
    sent = traffic(name, chosen, params, mesh).until
    return train(program, rate, config.seed, due=due, sent=sent, show=True)


def cells(r: Run, first: Run) -> dict[str, str]:
    """The row of a run; shares of bytes are of the first."""
    share = r.sent[-1] / first.sent[-1]
    return {
        "optimizer": r.name,
        "KiB sent per step": f"{r.sent[-1] / r.steps[-1] / 1024:.1f}",
        "share": f"{share:.3f}",
        "of bfloat16": f"{2 * share:.3f}",
        "evaluation loss": f"{r.losses[-1]:.3f}",
        "rate": f"{r.rate:g}",
        "ms per step": f"{r.step_seconds * 1000:.0f}",
    }


def picture(runs: list[Run], unit: str, path: Path) -> None:
    """Loss against bytes, then against steps, one legend above both."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_bytes, by_step) = plt.subplots(
        1, 2, figsize=(8.5, 3.8), sharey=True, layout="constrained"
    )
    for r in runs:
        mib = [sent / 2**20 for sent in r.sent]
        by_bytes.plot(mib, r.losses, marker="o", markersize=4, label=r.name)
        by_step.plot(r.steps, r.losses, marker="o", markersize=4)
    by_bytes.set(xlabel="MiB sent by each worker", xscale="log")
    by_bytes.set(ylabel=f"evaluation loss, {unit}")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    by_step.set(xlabel="step")
    for axes in (by_bytes, by_step):
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(runs), frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(config: Config, settings: dict[str, Any]) -> list[Run]:
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out: cannot write to {config.out}: {error}") from error
    mesh = processes.local_mesh(config.workers)  # only to read bytes off programs
    task = job(config)
    rates = config.rate or [METHODS[name].rate for name in config.optimizer]
    runs = [
        run(name, rate, task, config, mesh, settings)
        for name, rate in zip(config.optimizer, rates, strict=True)
    ]
    title = (
        f"{config.workers} workers x {config.batch} sequences of {config.context} "
        f"bytes, {config.steps} steps, seed {config.seed}"
    )
    caption = f"workers simulated on one device; {hardware(jax.devices()[0])}"
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(title, [cells(r, runs[0]) for r in runs], caption))
    picture(runs, task.unit, config.out / "curves.png")
    figures = json.dumps([dataclasses.asdict(r) for r in runs], indent=1)
    (config.out / "results.json").write_text(figures + "\n")
    console.print(f"Wrote curves.png and results.json to {config.out}")
    return runs


if __name__ == "__main__":
    settings, rest = exchange_settings()
    main(tyro.cli(Config, args=rest, description=f"{__doc__} {HELP}"), settings)
