"""Trains each method with real workers, one on each device, at the best of its rates.

Bytes are read off the compiled optimizer; for JointSpar only the layers drawn count.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.table import Table

import slamb_jax
from benchmarks.train.results import Result, Results
from benchmarks.train.tasks import DigitNet, byte_lm, digits
from examples.byte_lm.methods import LARS
from examples.byte_lm.model import blocks
from examples.common import AXIS, simulated
from examples.common.optimizers import dense
from examples.common.simulated import Method, Program, Run, Task, train
from examples.common.tables import spread, table
from examples.common.traffic import report_of
from slamb_jax import jointspar

POWERS = (-1, 0, 1)  # of two, times the middle of a method's rates
EVALUATIONS = 8
SYNC_EVERY = 25  # of SLAMB


@dataclasses.dataclass(frozen=True)
class Job:
    """A task and the settings that suit it."""

    make: Callable[[], Task]
    batch: int  # examples per worker and step
    layers: Callable[[optax.Params], dict[str, str | None]]  # JointSpar's labels
    min_size: int  # of the matrices that SLAMB exchanges in part


JOBS = {
    "digits": Job(digits, 16, DigitNet.layers, 256),
    "byte_lm": Job(functools.partial(byte_lm, 4), 2, blocks, 1000),
}


def layer_sizes(job: Job) -> dict[str | None, int]:
    """The number of elements of each layer; of all that is always trained, for None."""
    params = jax.eval_shape(job.make().init, jax.random.key(0))
    sizes: dict[str | None, int] = {}
    for name, label in job.layers(params).items():
        here = sum(x.size for x in jax.tree.leaves(params[name]))
        sizes[label] = sizes.get(label, 0) + here
    return sizes


def methods(name: str, steps: int) -> list[tuple[Method, float]]:
    """The rows of the table, each with the middle of its rates."""
    layers = len(layer_sizes(JOBS[name])) - 1

    def sparse(
        share: float, sampling: Literal["shared", "per_worker"] = "shared"
    ) -> Method:
        own = ", own draws" if sampling == "per_worker" else ""
        return Method(
            f"JointSpar-LARS, {share:g} D{own}",
            lambda rate, exchange: jointspar.jointspar(
                optax.lars(rate, **LARS), exchange, JOBS[name].layers, share * layers,
                horizon=steps, sampling=sampling,
            ),
        )  # fmt: skip

    selection = slamb_jax.selections.Strided(0.1, min_size=JOBS[name].min_size)
    exchange = slamb_jax.Exchange.paper(
        AXIS, sync_every=SYNC_EVERY, selection=selection
    )
    slamb = functools.partial(slamb_jax.slamb, b3=0.7)
    return [
        (Method("LARS", lambda rate, _: dense(optax.lars(rate, **LARS), AXIS)), 1.0),
        (sparse(0.75), 1.0),
        (sparse(0.5), 1.0),
        (sparse(0.5, "per_worker"), 1.0),
        (Method("LAMB", lambda rate, _: dense(optax.lamb(rate), AXIS)), 0.02),
        (Method("SLAMB", slamb, exchange), 0.02),
    ]


def bytes_sent(
    run: Run, report: slamb_jax.wire.WireReport, sizes: dict[str | None, int]
) -> list[float]:
    """The bytes that each worker has sent by each evaluation."""
    total = sum(size for name, size in sizes.items() if name is not None)

    def until(steps: int) -> float:
        often: float = -(-steps // SYNC_EVERY)
        if run.active:  # JointSpar's layers stand in branches, each of its size
            drawn = (k for t in run.active[:steps] for k, share in t.items() if share)
            often = sum(sizes[name] / total for name in drawn)
        branches = report.bytes_sent(conditional=True)
        return steps * report.bytes_sent() + often * branches

    return [until(steps) for steps in run.steps]


def train_all(
    name: str,
    mesh: Mesh,
    steps: int,
    seeds: Sequence[int],
    results: Results,
    report: Callable[[str], None],
) -> list[list[Result]]:
    """The runs of all seeds of each method, at the rate that is best for the first."""
    job, n = JOBS[name], mesh.size
    task, sizes = job.make(), layer_sizes(job)
    params = jax.eval_shape(task.init, jax.random.key(0))

    @functools.lru_cache(1)
    def compiled(method: Method) -> tuple[Program, slamb_jax.wire.WireReport]:
        program = Program(
            task, method, workers=n, batch=job.batch, steps=steps, mesh=mesh
        )
        tx = method.make(optax.constant_schedule(1.0), method.exchange)
        return program, report_of(tx, method.exchange, params, mesh)

    def run(method: Method, rate: float, seed: int) -> Result:
        key = {"task": name, "method": method.name, "workers": n,
               "steps": steps, "rate": rate, "seed": seed}  # fmt: skip
        if (result := results.get(key)) is None:
            program, wire = compiled(method)
            due = simulated.evaluation_steps(steps, EVALUATIONS)
            found = train(program, rate, seed, due=due)
            shares = [statistics.fmean(drawn.values()) for drawn in found.active]
            result = {
                "steps": found.steps,
                "losses": found.losses,
                "sent": bytes_sent(found, wire, sizes),
                "seconds": found.seconds,
                "key": key,
                "active": statistics.fmean(shares) if shares else 1.0,
            }
            results.add(result)
            report(f"{result['losses'][-1]:.3f}  {method.name}  {rate:g}  seed {seed}")
        return result

    rows = []
    for method, middle in methods(name, steps):
        sweep = [run(method, middle * 2.0**power, seeds[0]) for power in POWERS]
        best = min(sweep, key=lambda r: np.nan_to_num(r["losses"][-1], nan=np.inf))
        others = [run(method, best["key"]["rate"], seed) for seed in seeds[1:]]
        rows.append([best, *others])
    return rows


def training_table(
    found: Sequence[Sequence[Result]], title: str, machine: str
) -> Table:
    """A row for each method, with the deviation of its losses over the seeds."""
    rows = []
    for runs in found:
        first, times = runs[0], [r["seconds"][-1] / r["steps"][-1] for r in runs]
        sent = first["sent"][-1]
        rows.append(
            {
                "method": first["key"]["method"],
                "rate": f"{first['key']['rate']:g}",
                "active": f"{first['active']:.2f}",
                "loss": spread([r["losses"][-1] for r in runs]),
                "MiB sent": f"{sent / 2**20:.2f}",
                "/ dense": f"{sent / found[0][0]['sent'][-1]:.3f}",
                "ms a step": f"{statistics.median(times) * 1e3:.1f}",
            }
        )
    return table(title, rows, f"± is the deviation over seeds. {machine}")
