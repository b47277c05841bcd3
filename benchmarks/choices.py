"""What each choice of an exchange sends, reaches and takes, on the main job.

Run from the root of the repository: ``python -m benchmarks.choices``. It trains the
model of examples/byte_lm on 8 devices with each choice, one after the other, and prints
a table. Runs that are there already are not made again.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import Mesh
from rich.console import Console

import slamb_jax
from examples.byte_lm import main as main_job
from examples.common import processes
from examples.common.optimizers import dense
from examples.common.simulated import AXIS, Method, Program, Task, train
from examples.common.tables import table
from examples.common.traffic import slamb_traffic
from examples.hardware import hardware
from slamb_jax import recipes
from slamb_jax.recipes import Recipe

WORKERS, BATCH, GROUP = 8, 8, 2  # devices; sequences of each; devices in a group
LOCAL = "device"  # the axis of a group
DENSE, RATE, DENSE_RATE = "LAMB (dense)", 0.02, 0.015
SIXTEEN = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}


CHOICES = {  # settings that differ from a SLAMB with H = 25
    "SLAMB": Recipe({}, {}),
    "v of the momentum": Recipe({}, {"nu_of": "momentum"}),
    "recipe FLOAT32": recipes.FLOAT32,
    "recipe FEW_BYTES": recipes.FEW_BYTES,
    "recipe LARGE_BATCH": recipes.LARGE_BATCH,
    "payload bfloat16": Recipe({"payload": "bfloat16"}, {}),
    "payload uniform8": Recipe({"payload": "uniform8"}, {}),
    "payload natural8": Recipe({"payload": "natural8"}, {}),
    "payload uniform4": Recipe({"payload": "uniform4"}, {}),
    "payload and average uniform8": Recipe(
        {"payload": "uniform8", "average_payload": "uniform8"}, {}
    ),
    "top-k": Recipe({"selection": "top_k"}, {}),
    "permutation": Recipe({"selection": "permutation"}, {}),
    "overlap": Recipe({"overlap": True}, {}),
    "groups of 2": Recipe({"local_axis_name": LOCAL}, {}),
    "bfloat16, float32 master": Recipe({}, SIXTEEN),
    "bfloat16, stochastic": Recipe({}, SIXTEEN),
}
ROUNDING: dict[str, Any] = {  # of a training in bfloat16
    "bfloat16, float32 master": "master",
    "bfloat16, stochastic": "stochastic",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    steps: int = 500
    seed: int = 0
    only: tuple[str, ...] = ()
    """Choices by their names in the table; without, all."""
    out: Path = Path("runs/choices")


def method_of(name: str, seed: int) -> Method:
    if name == DENSE:
        return Method(name, lambda rate, _: dense(optax.lamb(rate), AXIS))
    choice, rounding = CHOICES[name], ROUNDING.get(name)

    def make(rate: Any, exchange: slamb_jax.Exchange) -> optax.GradientTransformation:
        tx = slamb_jax.slamb(rate, exchange, **choice.optimizer)
        if rounding is None:
            return tx
        return slamb_jax.train_in_bfloat16(tx, rounding, seed=seed)

    settings = {"sync_every": 25} | choice.settings
    return Method(name, make, slamb_jax.Exchange(AXIS, **settings))


def narrow(init: Callable[[jax.Array], Any], key: jax.Array) -> optax.Params:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), init(key))


def run(name: str, config: Config, task: Task) -> dict[str, Any]:
    """Trains with one choice on as many devices whatever it is."""
    method = method_of(name, config.seed)
    mesh = processes.local_mesh(WORKERS)
    if method.exchange.local_axis_name is not None:
        mesh = Mesh(mesh.devices.reshape(-1, GROUP), (AXIS, LOCAL))
    if name in ROUNDING:
        task = dataclasses.replace(task, init=functools.partial(narrow, task.init))
    params = jax.eval_shape(task.init, jax.random.key(0))
    program = Program(
        task, method, workers=WORKERS, batch=BATCH, steps=config.steps, mesh=mesh
    )
    make = functools.partial(method.make, optax.constant_schedule(1.0))
    sent = slamb_traffic(make, method.exchange, params, mesh).until
    rate = DENSE_RATE if name == DENSE else RATE
    found = train(program, rate, config.seed, sent=sent, show=True)
    return dataclasses.asdict(found)


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
            found = json.dumps(run(name, config, task), indent=1)
            file.write_text(found + "\n")
        runs.append(json.loads(file.read_text()))
    rows = [
        {
            "choice": r["name"],
            "evaluation loss": f"{r['losses'][-1]:.3f}",
            "KiB sent per step": f"{r['sent'][-1] / config.steps / 1024:.1f}",
            "share": f"{r['sent'][-1] / runs[0]['sent'][-1]:.3f}",
            "ms per step": f"{r['step_seconds'] * 1000:.0f}",
        }
        for r in runs
    ]
    title = f"{WORKERS} workers, {config.steps} steps, seed {config.seed}"
    console.print(table(title, rows, hardware(jax.devices()[0])))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
