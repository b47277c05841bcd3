"""Trains each method with real workers, one on each device, at the best of its rates.

Bytes are read off the compiled optimizer; for JointSpar only the layers drawn count.
"""

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import slamb_jax
from benchmarks.train.results import Result, Results
from benchmarks.train.tasks import DigitNet, byte_lm, digits
from examples.byte_lm.model import blocks
from examples.common import AXIS
from examples.common.optimizers import dense
from examples.common.simulated import Method, Program, Run, Task, train
from examples.common.tables import spread
from examples.common.traffic import report_of
from slamb_jax import jointspar

POWERS = (-1, 0, 1)  # of two, times the middle of a method's rates
SYNC_EVERY = 25  # of SLAMB


class Job(NamedTuple):
    """A task and the settings that suit it."""

    make: Callable[[], Task]
    batch: int  # examples per worker and step
    layers: Callable[[optax.Params], dict[str, str | None]]  # JointSpar's labels
    min_size: int  # of the matrices that SLAMB exchanges in part


JOBS = {
    "digits": Job(digits, 16, DigitNet.layers, 256),
    "byte_lm": Job(functools.partial(byte_lm, 4), 2, blocks, 1000),
}


def lars(rate: Any) -> optax.GradientTransformation:
    """Its relative step is 0.005 at a rate of 1; biases and norms start from zero."""

    def matrices(params: optax.Params) -> optax.Params:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.lars(rate, trust_coefficient=0.005, trust_ratio_mask=matrices)


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
    job, layers = JOBS[name], len(layer_sizes(JOBS[name])) - 1

    def sparse(title: str, share: float, **own: Any) -> tuple[Method, float]:
        def make(rate: Any, exchange: slamb_jax.Exchange) -> Any:
            how = {"horizon": steps, **own}
            budget = share * layers
            return jointspar.jointspar(lars(rate), exchange, job.layers, budget, **how)

        return Method(f"JointSpar-LARS, {title}", make), 1.0

    selection = slamb_jax.selections.Strided(0.1, min_size=job.min_size)
    paper = slamb_jax.Exchange.paper(AXIS, sync_every=SYNC_EVERY, selection=selection)
    slamb = functools.partial(slamb_jax.slamb, b3=0.7)
    return [
        (Method("LARS", lambda rate, _: dense(lars(rate), AXIS)), 1.0),
        sparse("0.75 D", 0.75),
        sparse("0.5 D", 0.5),
        sparse("0.5 D, own draws", 0.5, sampling="per_worker"),
        (Method("LAMB", lambda rate, _: dense(optax.lamb(rate), AXIS)), 0.02),
        (Method("SLAMB", slamb, paper), 0.02),
    ]


def bytes_sent(
    run: Run, report: slamb_jax.wire.WireReport, sizes: dict[str | None, int]
) -> float:
    """The bytes that each worker has sent in the end."""
    steps = run.steps[-1]
    often: float = -(-steps // SYNC_EVERY)
    if run.active:  # JointSpar's layers stand in branches, each of its size
        total = sum(size for name, size in sizes.items() if name is not None)
        drawn = (name for t in run.active for name, share in t.items() if share)
        often = sum(sizes[name] / total for name in drawn)
    return steps * report.bytes_sent() + often * report.bytes_sent(conditional=True)


def train_all(
    name: str,
    mesh: Mesh,
    steps: int,
    seeds: Sequence[int],
    results: Results,
    tell: Callable[[str], None],
) -> list[list[Result]]:
    """The runs of all seeds of each method, at the rate that is best for the first."""
    job, n = JOBS[name], mesh.size
    task, sizes = job.make(), layer_sizes(job)
    params = jax.eval_shape(task.init, jax.random.key(0))

    @functools.lru_cache(1)
    def program(method: Method) -> Program:
        return Program(task, method, workers=n, batch=job.batch, steps=steps, mesh=mesh)

    def run(method: Method, rate: float, seed: int) -> Result:
        key = {"task": name, "method": method.name, "workers": n,
               "steps": steps, "rate": rate, "seed": seed}  # fmt: skip
        if (result := results.get(key)) is None:
            found = train(program(method), rate, seed, due=[steps])
            tx = method.make(optax.constant_schedule(1.0), method.exchange)
            wire = report_of(tx, method.exchange, params, mesh)
            shares = [statistics.fmean(drawn.values()) for drawn in found.active]
            result = {
                "key": key,
                "loss": found.losses[-1],
                "sent": bytes_sent(found, wire, sizes),
                "step_seconds": found.step_seconds,
                "active": statistics.fmean(shares or [1.0]),
            }
            results.add(result)
            tell(f"{result['loss']:.3f}  {method.name}  {rate:g}  seed {seed}")
        return result

    rows = []
    for method, middle in methods(name, steps):
        sweep = [run(method, middle * 2.0**power, seeds[0]) for power in POWERS]
        best = min(sweep, key=lambda r: np.nan_to_num(r["loss"], nan=np.inf))
        others = [run(method, best["key"]["rate"], seed) for seed in seeds[1:]]
        rows.append([best, *others])
    return rows


def cells(runs: Sequence[Result], dense_runs: Iterable[Result]) -> dict[str, str]:
    """The row of a method, with the deviation of its losses over the seeds."""
    first, sent = runs[0], next(iter(dense_runs))["sent"]
    return {
        "method": first["key"]["method"],
        "rate": f"{first['key']['rate']:g}",
        "active": f"{first['active']:.2f}",
        "loss": spread([r["loss"] for r in runs]),
        "MiB sent": f"{first['sent'] / 2**20:.2f}",
        "/ dense": f"{first['sent'] / sent:.3f}",
        "ms a step": f"{1e3 * statistics.median(r['step_seconds'] for r in runs):.1f}",
    }
