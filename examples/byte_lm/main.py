"""SLAMB beside dense LAMB: a byte-level transformer on real text, 8 workers.

Run from the root of the repository: ``python -m examples.byte_lm.main``. It trains on
the source code of the Python standard library, or on ``--files`` of yours; prints a
table, and writes a picture and the figures behind it to ``--out``. Other optimizers
by name: ``--optimizer lars jointspar_lars``.
"""

import dataclasses
import json
from pathlib import Path

import jax
import matplotlib
import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from examples.byte_lm import data
from examples.byte_lm.train import AXIS, OPTIMIZERS, Config, Result, train
from examples.hardware import hardware


def worker_mesh(workers: int) -> jax.sharding.Mesh:
    """A mesh of that many accelerators, or else of as many CPU devices."""
    jax.config.update("jax_num_cpu_devices", workers)
    devices = jax.devices()
    if len(devices) < workers:
        devices = jax.devices("cpu")
    return jax.make_mesh((workers,), (AXIS,), devices=devices[:workers])


def progress_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )


def table(results: list[Result], config: Config, machine: str) -> Table:
    dense = results[0]
    out = Table(
        title=f"{config.workers} workers x {config.batch} sequences of "
        f"{config.context} bytes, {config.steps} steps, seed {config.seed}",
        caption=machine,
    )
    heads = (
        "optimizer",
        "evaluation loss",
        "KiB sent per step",
        "share",
        "ms per step",
    )
    for head in heads:
        out.add_column(head, justify="left" if head == "optimizer" else "right")
    for r in results:
        out.add_row(
            r.name,
            f"{r.losses[-1]:.3f}",
            f"{r.bytes_per_step / 1024:.1f}",
            f"{r.bytes_per_step / dense.bytes_per_step:.3f}",
            f"{r.step_seconds * 1000:.0f}",
        )
    return out


def picture(results: list[Result], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(
        1, 2, figsize=(9, 3.6), sharey=True, layout="constrained"
    )
    for r in results:
        by_step.plot(r.steps, r.losses, marker="o", markersize=3, label=r.name)
        sent = [s * r.bytes_per_step / 2**20 for s in r.steps]
        by_bytes.plot(sent, r.losses, marker="o", markersize=3, label=r.name)
    by_step.set(xlabel="step", ylabel="evaluation loss, nats per byte")
    by_bytes.set(xlabel="MiB sent by each worker", xscale="log")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    figure.savefig(path, dpi=150)


def blocks_line(r: Result) -> str:
    """Of JointSpar: what was asked for, what was drawn, what was learned."""
    last = ", ".join(f"{k} {p[-1]:.2f}" for k, p in r.blocks["probabilities"].items())
    return (
        f"{r.name}: budget {r.blocks['budget']:g} of {len(r.blocks['probabilities'])} "
        f"blocks, p_min {r.blocks['p_min']:.3g}; {r.blocks['active']:.3f} of them "
        f"active on average; probabilities in the end: {last}"
    )


def blocks_picture(r: Result, path: Path) -> None:
    """The distribution over the blocks, step by step."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for name, p in r.blocks["probabilities"].items():
        axes.plot(range(1, len(p) + 1), p, label=name)
    axes.axhline(r.blocks["p_min"], color="gray", linestyle=":", label="p_min")
    axes.set(xlabel="step", ylabel="probability to be trained", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def main(config: Config) -> list[Result]:
    console = Console()
    try:
        config.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out: cannot write to {config.out}: {error}") from error
    files = data.text_files(config.files) if config.files else data.standard_library()
    text, held_out = data.load(files, config.context)
    mesh = worker_mesh(config.workers)
    machine = hardware(mesh.devices.flat[0])
    console.print(
        f"{len(text):,} bytes to train on, {len(held_out):,} held out, from "
        f"{len(files):,} files"
    )
    results = []
    with progress_bar(console) as bars:
        for name, make in (OPTIMIZERS[choice] for choice in config.optimizer):
            task = bars.add_task(f"{name:12}", total=config.steps, loss="compiling")

            def report(step: int, losses: list[float], task: int = task) -> None:
                loss = f"evaluation loss {losses[-1]:.3f}" if losses else ""
                bars.update(task, completed=step, loss=loss)

            tx = make(config)
            results.append(train(name, tx, config, text, held_out, mesh, report))
    console.print(table(results, config, machine))

    wrote = [config.out / "curves.png", config.out / "results.json"]
    picture(results, wrote[0])
    for r in results:
        if r.blocks:
            console.print(blocks_line(r))
            wrote.append(config.out / "blocks.png")
            blocks_picture(r, wrote[-1])
    figures = [dataclasses.asdict(r) for r in results]
    wrote[1].write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"Wrote {' and '.join(map(str, wrote))}")
    return results


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
