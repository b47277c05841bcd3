"""Trains each method with real workers, one on each device, at the best of its rates.

Bytes are those of the compiled optimizer; of JointSpar, those of the layers drawn.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.table import Table

import slamb_jax
from benchmarks.frontier.methods import MIN_SIZE
from benchmarks.frontier.report import columns, spread
from benchmarks.frontier.results import Result, Results
from benchmarks.frontier.tasks import DigitNet, byte_lm, digits
from examples.byte_lm.methods import TRUST, matrices
from examples.byte_lm.model import blocks
from examples.common import AXIS
from examples.common.optimizers import dense
from examples.common.simulated import (
    Batch,
    Method,
    Program,
    State,
    Task,
    evaluation_steps,
    train,
)
from examples.common.traffic import report_of
from slamb_jax import jointspar

POWERS = (-1, 0, 1)  # of two, times the middle of a method's rates
EVALUATIONS = 8
SYNC_EVERY = 25  # of SLAMB


@dataclasses.dataclass(frozen=True)
class Job:
    """A task, the examples per worker and step, and JointSpar's labels."""

    make: Callable[[], Task]
    batch: int
    layers: Callable[[optax.Params], dict[str, str | None]]


JOBS = {
    "digits": Job(digits, 16, DigitNet.layers),
    "byte_lm": Job(functools.partial(byte_lm, 4), 2, blocks),
}


def layer_sizes(job: Job) -> dict[str | None, int]:
    """The elements of each layer; None is what is trained at every step."""
    params = jax.eval_shape(job.make().init, jax.random.key(0))
    sizes: dict[str | None, int] = {}
    for name, label in job.layers(params).items():
        here = sum(x.size for x in jax.tree.leaves(params[name]))
        sizes[label] = sizes.get(label, 0) + here
    return sizes


def methods(name: str, steps: int) -> list[tuple[Method, float]]:
    """The rows of the table, each with the middle of its rates."""
    layers = len(layer_sizes(JOBS[name])) - 1
    lars: dict[str, Any] = {"trust_coefficient": TRUST, "trust_ratio_mask": matrices}

    def sparse(
        share: float, sampling: Literal["shared", "per_worker"] = "shared"
    ) -> Method:
        own = ", own draws" if sampling == "per_worker" else ""
        return Method(
            f"JointSpar-LARS, {share:g} D{own}",
            lambda rate, _: jointspar.jointspar_lars(
                rate, JOBS[name].layers, share * layers, horizon=steps,
                axis_name=AXIS, sampling=sampling, **lars,
            ),
        )  # fmt: skip

    exchange = slamb_jax.Exchange(AXIS, sync_every=SYNC_EVERY, min_size=MIN_SIZE[name])
    return [
        (Method("LARS", lambda rate, _: dense(optax.lars(rate, **lars), AXIS)), 1.0),
        (sparse(0.75), 1.0),
        (sparse(0.5), 1.0),
        (sparse(0.5, "per_worker"), 1.0),
        (Method("LAMB", lambda rate, _: dense(optax.lamb(rate), AXIS)), 0.02),
        (Method("SLAMB", slamb_jax.slamb, exchange), 0.02),
    ]


class Counted(Program):
    """A program that counts bytes by the layers that its workers draw."""

    def __init__(self, job: Job, method: Method, mesh: Mesh, steps: int) -> None:
        n = mesh.size
        super().__init__(
            job.make(), method, workers=n, batch=job.batch, steps=steps, mesh=mesh
        )
        params = jax.eval_shape(self.task.init, jax.random.key(0))
        tx = method.make(optax.constant_schedule(1.0), method.exchange)
        self._report = report_of(tx, method.exchange, params, mesh)
        self._sizes, program = layer_sizes(job), self.step

        def recorded(state: State, batch: Batch) -> tuple[State, Any]:
            state, about = program(state, batch)
            if about is not None:
                self._drawn.append(about[0])
            return state, about

        self.step = recorded  # type: ignore[assignment]

    def start(self, rate: float, seed: int) -> State:
        self._drawn: list[dict[str, jax.Array]] = []
        return super().start(rate, seed)

    def active(self) -> float:
        """The mean share of layers that were active."""
        shares = [np.mean([*drawn.values()]) for drawn in self._drawn]
        return float(np.mean(shares)) if shares else 1.0

    def sent(self, steps: int) -> float:
        """Bytes that each worker sent in the first steps of the run."""
        often: float = -(-steps // SYNC_EVERY)
        if self._drawn:  # the layers stand in branches, each of its size
            total = sum(n for name, n in self._sizes.items() if name is not None)
            often = sum(
                self._sizes[name] / total
                for drawn in self._drawn[:steps]
                for name, flags in drawn.items()
                if np.any(flags)
            )
        branches = self._report.bytes_sent(conditional=True)
        return steps * self._report.bytes_sent() + often * branches


def train_all(
    name: str,
    mesh: Mesh,
    steps: int,
    seeds: Sequence[int],
    results: Results,
    report: Callable[[str], None],
) -> list[list[Result]]:
    """Of each method, the runs of all seeds at the rate that was best for the first."""
    job = JOBS[name]
    due = evaluation_steps(steps, EVALUATIONS)
    program = functools.lru_cache(1)(lambda method: Counted(job, method, mesh, steps))

    def run(method: Method, rate: float, seed: int) -> Result:
        key = {"task": name, "method": method.name, "workers": mesh.size,
               "steps": steps, "rate": rate, "seed": seed}  # fmt: skip
        if (result := results.get(key)) is None:
            trained = program(method)
            found = dataclasses.asdict(
                train(trained, rate, seed, due=due, sent=trained.sent)
            )
            result = {k: found[k] for k in ("steps", "losses", "sent", "seconds")}
            result |= {"key": key, "active": trained.active()}
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
    """A row for each method; losses with their deviation over the seeds."""
    out = Table(title=title, caption=f"± is the deviation over seeds. {machine}")
    heads = "method", "rate", "active", "loss", "MiB sent", "/ dense", "ms a step"
    columns(out, *heads)
    dense = found[0][0]["sent"][-1]
    for runs in found:
        first, times = runs[0], [r["seconds"][-1] / r["steps"][-1] for r in runs]
        out.add_row(
            first["key"]["method"],
            f"{first['key']['rate']:g}",
            f"{first['active']:.2f}",
            spread([r["losses"][-1] for r in runs]),
            f"{first['sent'][-1] / 2**20:.2f}",
            f"{first['sent'][-1] / dense:.3f}",
            f"{statistics.median(times) * 1e3:.1f}",
        )
    return out
