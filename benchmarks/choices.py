"""What each choice of SLAMB sends, reaches and takes, on the main job.

Run from the root of the repository: ``python -m benchmarks.choices``. It trains
examples/byte_lm with each choice, one after the other, and prints a table. Runs that
are there already are not made again.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
import tyro
from rich.console import Console
from rich.table import Table

import slamb_jax
from examples.byte_lm import data, train
from examples.byte_lm.main import progress_bar, worker_mesh
from examples.hardware import hardware


@dataclasses.dataclass(frozen=True)
class Blocks(slamb_jax.Strided):
    """The round robin with rows of a width of its own."""

    most: int = 1

    def width(self, leaf: slamb_jax.Leaf) -> int:
        """The largest divisor of the last dimension up to ``most``."""
        last = leaf.shape[-1]
        return max(w for w in range(1, min(last, self.most) + 1) if last % w == 0)


GROUP = 2  # devices in a group, where there are groups
SIXTEEN = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
EIGHT = slamb_jax.StochasticUniform()
CHOICES: dict[str, dict[str, Any]] = {
    "SLAMB": {},
    "v of the momentum": {"nu_of": "momentum"},
    "recipe FLOAT32": dict(slamb_jax.recipes.FLOAT32),
    "recipe FEW_BYTES": dict(slamb_jax.recipes.FEW_BYTES),
    "recipe LARGE_BATCH": dict(slamb_jax.recipes.LARGE_BATCH),
    "recipe NOISY": dict(slamb_jax.recipes.NOISY),
    "payload bfloat16": {"payload": "bfloat16"},
    "payload 8 bit": {"payload": EIGHT},
    "payload 8 bit, natural": {"payload": slamb_jax.NaturalCompression()},
    "payload 4 bit": {"payload": slamb_jax.StochasticUniform(bits=4)},
    "payload and average 8 bit": {"payload": EIGHT, "average_payload": EIGHT},
    "top-k": {"selection": "top_k"},
    "blocks of 1": {"selection": Blocks(most=1)},
    "blocks of whole rows": {"selection": Blocks(most=2**20)},
    "overlap": {"overlap": True},
    "groups of 2": {"local_axis_name": "device"},
    "bfloat16, float32 master": {"rounding": "master", **SIXTEEN},
    "bfloat16, stochastic": {"rounding": "stochastic", **SIXTEEN},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    steps: int = 500
    seed: int = 0
    only: tuple[str, ...] = ()
    """Choices by their names in the table; all without."""
    out: Path = Path("runs/choices")


def optimizer(choice: dict[str, Any], config: train.Config) -> Any:
    """The main job's SLAMB with this choice."""
    settings = {"b3": config.b3} | choice | {"sync_every": config.sync_every}
    settings.pop("rounding", None)
    rate = train.schedule(config.slamb_rate, config.steps)
    return slamb_jax.slamb(rate, axis_name=train.AXIS, **settings)


def main_job(config: Config, choice: dict[str, Any]) -> train.Config:
    """The main job with what it must know of the choice, the bytes' H included."""
    rounding = choice.get("rounding")
    precision: Any = f"bfloat16_{rounding}" if rounding else "float32"
    sync_every = choice.get("sync_every", train.Config.sync_every)
    return train.Config(
        steps=config.steps,
        seed=config.seed,
        precision=precision,
        sync_every=sync_every,
    )


def run(
    name: str, config: Config, texts: tuple[Any, Any], report: Callable[..., None]
) -> train.Result:
    """Trains with one choice, on as many devices whatever it is."""
    choice = CHOICES.get(name)
    job = main_job(config, choice or {})
    mesh = worker_mesh(job.workers)
    if choice and "local_axis_name" in choice:
        devices = mesh.devices.reshape(-1, GROUP)
        mesh = jax.sharding.Mesh(devices, (train.AXIS, choice["local_axis_name"]))
    tx: optax.GradientTransformation
    tx = train.lamb(job) if choice is None else optimizer(choice, job)
    return train.train(name, tx, job, *texts, mesh, report)


def table(results: list[train.Result], title: str, machine: str) -> Table:
    """A row for each; bytes without those within a group."""
    dense = results[0].bytes_per_step
    out = Table(title=title, caption=machine)
    heads = ("choice", "evaluation loss", "KiB sent per step", "share", "ms per step")
    for head in heads:
        out.add_column(head, justify="left" if head == "choice" else "right")
    for r in results:
        between = r.bytes_per_step - r.local_bytes_per_step
        out.add_row(
            r.name,
            f"{r.losses[-1]:.3f}",
            f"{between / 1024:.1f}",
            f"{between / dense:.3f}",
            f"{r.step_seconds * 1000:.0f}",
        )
    return out


def main(config: Config) -> None:
    console = Console()
    console.width = max(console.width, 100)
    if unknown := set(config.only) - {"LAMB (dense)", *CHOICES}:
        raise SystemExit(f"--only: {sorted(unknown)} are none of {[*CHOICES]}")
    config.out.mkdir(parents=True, exist_ok=True)
    texts = data.load(data.standard_library(), train.Config().context)
    results = []
    for name in ("LAMB (dense)", *(config.only or CHOICES)):
        file = config.out / f"{name}, {config.steps} steps, seed {config.seed}.json"
        if not file.exists():
            with progress_bar(console) as bars:
                task = bars.add_task(f"{name:26}", total=config.steps, loss="compiling")

                def report(step: int, losses: list[float], task: Any = task) -> None:
                    loss = f"evaluation loss {losses[-1]:.3f}" if losses else ""
                    bars.update(task, completed=step, loss=loss)

                result = run(name, config, texts, report)
            file.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
        results.append(train.Result(**json.loads(file.read_text())))
    job = train.Config()
    title = f"{job.workers} workers, {config.steps} steps, seed {config.seed}"
    machine = hardware(worker_mesh(job.workers).devices.flat[0])
    console.print(table(results, title, machine))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
