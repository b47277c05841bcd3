"""Bytes, loss and time of each choice of an exchange, on the main job.

Run from the root of the repository: ``python -m benchmarks.choices``. It trains the
model of examples/byte_lm on 8 devices with each choice, one after the other, and prints
a table. Runs that are there already are not made again.
"""

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
from examples.common.options import check_names
from examples.common.simulated import AXIS, Method, Program, Task, train
from examples.common.tables import table
from examples.common.traffic import traffic_of
from examples.hardware import hardware

WORKERS, BATCH, GROUP = 8, 8, 2  # devices; sequences of each; devices in a group
LOCAL = "device"  # the axis of a group
DENSE, RATE, DENSE_RATE, B2 = "AdamW (dense)", 0.008, 0.016, 0.95


class Choice(NamedTuple):
    """Settings that differ from the defaults, of an exchange and of AdamW."""

    exchange: Mapping[str, Any]
    optimizer: Mapping[str, Any] = types.MappingProxyType({})


SIXTEEN = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
NESTEROV = optax.sgd(0.7, momentum=0.5, nesterov=True)
CHOICES = {
    "the default": Choice({}),
    "largest of 7": Choice({"payload": "largest_of_7"}),
    "in uniform4": Choice({"payload": "uniform4"}),
    "in uniform8": Choice({"payload": "uniform8"}),
    "in bfloat16": Choice({"payload": "bfloat16"}),
    "in float32": Choice({"payload": None}),
    "an outer step every 30": Choice({"sync_every": 30, "outer": NESTEROV}),
    "local SGD, H 4": Choice({"sync_every": 4, "payload": None}),
    "overlap": Choice({"overlap": True}),
    "groups of 2": Choice({"local_axis_name": LOCAL}),
    "16-bit moments, float32 master": Choice({}, SIXTEEN),
    "16-bit moments, stochastic": Choice({}, SIXTEEN),
}
ROUNDING: dict[str, Any] = {  # of a training in bfloat16
    "16-bit moments, float32 master": "master",
    "16-bit moments, stochastic": "stochastic",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The choices to run."""

    steps: int = 400
    seed: int = 0
    only: tuple[str, ...] = ()
    """Choices by their names in the table; without, all."""
    out: Path = Path("runs/choices")


def method_of(name: str, seed: int) -> Method:
    if name == DENSE:
        adamw = functools.partial(optax.adamw, b2=B2, weight_decay=0.0)
        return Method(name, lambda rate, _: dense(adamw(rate), AXIS))
    choice, rounding = CHOICES[name], ROUNDING.get(name)

    def make(rate: Any, exchange: slamb_jax.Exchange) -> optax.GradientTransformation:
        tx = slamb_jax.adamw(
            rate, exchange, b2=B2, weight_decay=0.0, **choice.optimizer
        )
        if rounding is None:
            return tx
        return slamb_jax.train_in_bfloat16(tx, rounding, seed=seed)

    return Method(name, make, slamb_jax.Exchange(AXIS, **choice.exchange))


def narrow(init: Callable[[jax.Array], Any], key: jax.Array) -> optax.Params:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), init(key))


def run(name: str, config: Config, task: Task) -> dict[str, Any]:
    """Trains with one choice; the number of devices is the same for all."""
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
    sent = traffic_of(make, method.exchange, params, mesh).until
    rate = DENSE_RATE if name == DENSE else RATE
    found = train(program, rate, config.seed, sent=sent, show=True)
    return dataclasses.asdict(found)


def main(config: Config) -> None:
    console = Console()
    console.width = max(console.width, 100)
    check_names("--only", config.only, (DENSE, *CHOICES))
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
            "of bfloat16": f"{2 * r['sent'][-1] / runs[0]['sent'][-1]:.3f}",
            "ms per step": f"{r['step_seconds'] * 1000:.0f}",
        }
        for r in runs
    ]
    title = f"{WORKERS} workers, {config.steps} steps, seed {config.seed}"
    console.print(table(title, rows, hardware(jax.devices()[0])))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
