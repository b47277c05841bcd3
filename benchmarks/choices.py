"""What each choice of an exchange sends, reaches and takes, on the main job.

Run from the root of the repository: ``python -m benchmarks.choices``. It trains the
model of examples/byte_lm on 8 devices with each choice, one after the other, and prints
a table. Runs that are there already are not made again.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import slamb_jax
from examples.byte_lm import main as main_job
from examples.common import processes, records
from examples.common.optimizers import dense
from examples.common.simulated import AXIS, Method, Program, Task, train
from examples.common.traffic import Traffic, report_of
from examples.hardware import hardware
from slamb_jax import recipes

WORKERS, BATCH, GROUP = 8, 8, 2  # devices; sequences of each; devices in a group
LOCAL = "device"  # the axis of a group
DENSE, RATE, DENSE_RATE = "LAMB (dense)", 0.02, 0.015
SIXTEEN = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings that differ from a SLAMB with H = 25."""

    exchange: dict[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    rounding: Any = None  # of a training in bfloat16

    def method(self, name: str, seed: int) -> Method:
        def make(
            rate: optax.Schedule, exchange: slamb_jax.Exchange
        ) -> optax.GradientTransformation:
            tx = slamb_jax.slamb(rate, exchange, **self.optimizer)
            if self.rounding is None:
                return tx
            return slamb_jax.train_in_bfloat16(tx, self.rounding, seed=seed)

        settings = {"sync_every": 25} | self.exchange
        return Method(name, make, slamb_jax.Exchange(AXIS, **settings))


def recipe(chosen: recipes.Recipe) -> Choice:
    return Choice(chosen.settings, chosen.optimizer)


CHOICES = {
    "SLAMB": Choice(),
    "v of the momentum": Choice(optimizer={"nu_of": "momentum"}),
    "recipe FLOAT32": recipe(recipes.FLOAT32),
    "recipe FEW_BYTES": recipe(recipes.FEW_BYTES),
    "recipe LARGE_BATCH": recipe(recipes.LARGE_BATCH),
    "payload bfloat16": Choice({"payload": "bfloat16"}),
    "payload uniform8": Choice({"payload": "uniform8"}),
    "payload natural8": Choice({"payload": "natural8"}),
    "payload uniform4": Choice({"payload": "uniform4"}),
    "payload and average uniform8": Choice(
        {"payload": "uniform8", "average_payload": "uniform8"}
    ),
    "top-k": Choice({"selection": "top_k"}),
    "permutation": Choice({"selection": "permutation"}),
    "overlap": Choice({"overlap": True}),
    "groups of 2": Choice({"local_axis_name": LOCAL}),
    "bfloat16, float32 master": Choice(optimizer=SIXTEEN, rounding="master"),
    "bfloat16, stochastic": Choice(optimizer=SIXTEEN, rounding="stochastic"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    steps: int = 500
    seed: int = 0
    only: tuple[str, ...] = ()
    """Choices by their names in the table; without, all."""
    out: Path = Path("runs/choices")


def traffic(method: Method, params: optax.Params, mesh: Mesh) -> Traffic:
    """Bytes of each device, without those that stay within its group."""
    exchange = dataclasses.replace(method.exchange, sync_every=2)  # a branch of its own
    tx = method.make(optax.constant_schedule(1.0), exchange)
    report = report_of(tx, exchange, params, mesh)

    def between(conditional: bool) -> float:
        sent = report.bytes_sent(conditional=conditional)
        if exchange.local_axis_name is not None:
            sent -= report.bytes_over(mesh, LOCAL, conditional=conditional)
        return sent

    return Traffic({0: between(False)}, between(True), method.exchange.sync_every)


def run(name: str, config: Config, task: Task, show: Any) -> dict[str, Any]:
    """Trains with one choice on as many devices whatever it is."""
    choice = CHOICES.get(name, Choice())
    method = choice.method(name, config.seed)
    mesh = processes.local_mesh(WORKERS)
    if method.exchange.local_axis_name is not None:
        devices = mesh.devices.reshape(-1, GROUP)
        mesh = Mesh(devices, (AXIS, LOCAL))
    if name == DENSE:
        method = Method(name, lambda rate, _: dense(optax.lamb(rate), AXIS))
    if choice.rounding is not None:
        first = task.init
        task = dataclasses.replace(
            task,
            init=lambda key: jax.tree.map(lambda p: p.astype(jnp.bfloat16), first(key)),
        )
    params = jax.eval_shape(task.init, jax.random.key(0))
    program = Program(
        task, method, workers=WORKERS, batch=BATCH, steps=config.steps, mesh=mesh
    )
    sent = traffic(method, params, mesh)
    rate = DENSE_RATE if name == DENSE else RATE
    found = train(program, rate, config.seed, sent=sent.until, report=show)
    return dataclasses.asdict(found)


def table(runs: list[dict[str, Any]], title: str, machine: str) -> Table:
    """A row for each; bytes without those within a group."""
    out = Table(title=title, caption=machine)
    heads = ("choice", "evaluation loss", "KiB sent per step", "share", "ms per step")
    for head in heads:
        out.add_column(head, justify="left" if head == "choice" else "right")
    for r in runs:
        out.add_row(
            r["name"],
            f"{r['losses'][-1]:.3f}",
            f"{r['sent'][-1] / r['steps'][-1] / 1024:.1f}",
            f"{r['sent'][-1] / runs[0]['sent'][-1]:.3f}",
            f"{r['step_seconds'] * 1000:.0f}",
        )
    return out


def main(config: Config) -> None:
    console = Console()
    console.width = max(console.width, 100)
    if unknown := set(config.only) - {DENSE, *CHOICES}:
        raise SystemExit(f"--only: {sorted(unknown)} are none of {[*CHOICES]}")
    config.out.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_num_cpu_devices", WORKERS)
    task = main_job.job(main_job.Config())
    runs = []
    for name in (DENSE, *(config.only or CHOICES)):
        file = config.out / f"{name}, {config.steps} steps, seed {config.seed}.json"
        if not file.exists():
            with records.progress_bar(f"{name:28}", 0, config.steps) as bar:

                def show(step: int, losses: list[float], bar: Any = bar) -> None:
                    bar(step, f"evaluation loss {losses[-1]:.3f}" if losses else "")

                found = run(name, config, task, show)
            file.write_text(json.dumps(found, indent=1) + "\n")
        runs.append(json.loads(file.read_text()))
    title = f"{WORKERS} workers, {config.steps} steps, seed {config.seed}"
    console.print(table(runs, title, hardware(jax.devices()[0])))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
