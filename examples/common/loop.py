"""The programs' training loop: sharded, with checkpoints, watchdog and records."""

import dataclasses
import json
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

import slamb_jax
from examples.common import inputs, options, processes, records
from examples.common.diagnostics import diagnose
from examples.common.optimizers import optimizer, traffic
from examples.common.options import Options

Variables: TypeAlias = tuple[optax.Params, Any]  # and a model's statistics
Batch: TypeAlias = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """The model, loss, data and schedule of a program.

    ``loss(params, kept, batch, key)`` of one worker returns the loss and ``(kept,
    metrics)``. ``evaluate(params, kept, batch)`` returns sums over a batch, among them
    ``"weight"``, by which the others are divided; examples have a weight each.
    """

    init: Callable[[jax.Array], Variables]
    loss: Callable[..., tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]]
    evaluate: Callable[[optax.Params, Any, Batch], dict[str, jax.Array]]
    source: inputs.Source
    held_out: inputs.Source
    schedule: optax.Schedule
    steps: int
    augment: inputs.Augment | None = None
    decay_mask: Callable[[optax.Params], optax.Params] | None = None


class State(NamedTuple):
    """Of a worker; in arrays of all workers, as ``slamb_jax.replicate`` makes them."""

    params: optax.Params
    kept: Any
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    step: int
    metrics: dict[str, float]  # of the last evaluation
    bytes_sent: float  # by each worker, in all
    dense_bytes: float  # the same for averages of the gradients at every step
    step_seconds: float  # median of those since the last start

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The result of a run that is finished."""
        path = folder / "result.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None


def main(program: types.ModuleType, description: str) -> None:
    """Runs a program, its module ``train``, with the options of the command line."""
    config = options.parse(program.Config, description)
    mesh = processes.start(config)
    result = run(program.task(config, program.sources(config)), config, mesh)
    if jax.process_index() == 0:
        Console().print(
            f"{config.title}: {_note(result.metrics)} after {result.step} steps; "
            f"each worker sent {result.bytes_sent / 2**20:.2f} MiB; "
            f"{result.step_seconds * 1000:.0f} ms per step. In {config.out}"
        )


def compiled_step(task: Task, o: Options, mesh: Mesh) -> Any:
    """The step of all workers, ``(state, batch, key)``, to call or to lower."""
    tx = optimizer(o, task.schedule, task.decay_mask)
    gradient = jax.value_and_grad(task.loss, has_aux=True)  # a worker's own, no mean

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Any]:
        aux, grads = gradient(state.params, state.kept, batch, key)
        loss, (kept, metrics) = aux
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, kept, opt_state), {"loss": loss, **metrics}

    return slamb_jax.per_worker_step(step, mesh, o.exchange)


def shapes(task: Task, o: Options) -> tuple[State, Any, jax.Array]:
    """The arguments of the compiled step, without memory."""
    tx = optimizer(o, task.schedule, task.decay_mask)
    key = jax.random.key(0)
    params, kept = jax.eval_shape(task.init, key)
    state = State(params, kept, jax.eval_shape(tx.init, params))

    def leading(tree: Any, n: int) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((n, *np.shape(x)), x.dtype), tree
        )

    batch = leading(task.source[0], o.workers * o.batch_size)
    return leading(state, o.workers), batch, key


def run(task: Task, o: Options, mesh: Mesh) -> Result:
    """Trains to the end or to a signal; resumes a run that was stopped in ``o.out``."""
    started = o.out / "options.yaml"
    if started.exists():
        options.check_same_run(o, started)
    if result := Result.read(o.out):
        return result
    if task.steps < 1:
        raise SystemExit("--epochs: not one step of all workers; ask for more")
    stream = inputs.training(task.source, o.batch_size, o.workers, o.seed, task.augment)
    params, kept = jax.jit(task.init)(jax.random.key(o.seed))
    opt_state = optimizer(o, task.schedule, task.decay_mask).init(params)
    state = slamb_jax.replicate(State(params, kept, opt_state), mesh, o.exchange)
    kept_in = o.out / "checkpoints"
    with slamb_jax.Checkpoints(
        kept_in, asynchronous=True, exchange=o.exchange
    ) as checkpoints:
        start = 0
        snapshots = slamb_jax.Snapshots(o.snapshots) if o.snapshots else None
        if found := _latest(snapshots, checkpoints, state, o.workers):
            start, state, position = found
            inputs.resume(stream, position, o.workers)
        with (
            records.Records(o.out, start) as log,
            processes.Stop() as stop,
            slamb_jax.Watchdog(o.timeout) as watchdog,
        ):
            if jax.process_index() == 0:
                started.write_text(options.as_text(o))
            loop = _Loop(
                task, o, mesh, params, checkpoints, snapshots, log, stop, watchdog
            )
            result = loop.train(state, stream, start)
    if result is None:
        raise SystemExit(stop.status)
    if jax.process_index() == 0:
        text = json.dumps(dataclasses.asdict(result), indent=1)
        (o.out / "result.json").write_text(text + "\n")
    return result


def _latest(
    snapshots: slamb_jax.Snapshots | None,
    checkpoints: slamb_jax.Checkpoints,
    state: State,
    workers: int,
) -> tuple[int, State, dict[str, Any]] | None:
    """Step, state and position in the data, of snapshots or else of a checkpoint."""
    found = snapshots.restore(state) if snapshots else None
    if found is None or found.step < (checkpoints.latest() or 0):
        return checkpoints.restore(state, workers=workers)
    told = f"step {found.step} from snapshots, new workers: {found.newcomers or 'none'}"
    Console(quiet=jax.process_index() > 0).print(told)
    return found.step, found.state, found.extra


@dataclasses.dataclass
class _Loop:
    task: Task
    o: Options
    mesh: Mesh
    params: optax.Params  # of one worker
    checkpoints: slamb_jax.Checkpoints
    snapshots: slamb_jax.Snapshots | None
    log: records.Records
    stop: processes.Stop
    watchdog: slamb_jax.Watchdog

    def __post_init__(self) -> None:
        self.sent, self.dense = traffic(self.o, self.params, self.mesh)
        self.program = compiled_step(self.task, self.o, self.mesh)
        self.diagnosed = diagnose(self.o, self.mesh)
        self.scored = evaluator(self.task, self.o, self.mesh)

    def train(self, state: State, stream: Any, start: int) -> Result | None:
        """To the end; None if it was stopped, and saved."""
        o, last = self.o, self.task.steps
        scores: dict[str, float] = {}
        times: list[float] = []
        with records.progress_bar(o.title, start, last) as show:
            for step in range(start + 1, last + 1):
                self.watchdog.beat(step)
                began = time.perf_counter()
                state, metrics = self.one_step(state, stream, step)
                times.append(time.perf_counter() - began)
                if step % o.log_every == 0 or step == last:
                    means = {name: float(x.mean()) for name, x in metrics.items()}
                    self.log.write(step, means | self.rates(step, times))
                    show(step, _note(means | scores))
                if step % o.eval_every == 0 or step == last:
                    scores = self.evaluate(state, step)
                stopped = self.stop.now() and step < last
                position = inputs.position(stream, o.workers)
                if self.snapshots and (stopped or step % o.snapshot_every == 0):
                    self.snapshots.save(step, state, position)
                if stopped or step % o.checkpoint_every == 0 or step == last:
                    self.checkpoints.save(step, state, position)
                if stopped:
                    self.checkpoints.wait()
                    Console(quiet=jax.process_index() > 0).print(
                        f"Stopped and saved at step {step}; the same command resumes."
                    )
                    return None
            if not times:  # stopped after the last step and before the end
                scores = self.evaluate(state, last)
            show(last, _note(scores))
        seconds = float(np.median(times[1:] or times or [0.0]))
        sent = self.sent.until(last), self.dense.until(last)
        return Result(last, scores, *sent, seconds)

    def one_step(self, state: State, stream: Any, step: int) -> tuple[State, Any]:
        """One update, done when this returns; the metrics are the last mini-step's."""
        every = self.o.accumulate_steps
        for mini in range((step - 1) * every, step * every):
            batch = processes.split(self.mesh, next(stream))
            key = jax.random.fold_in(jax.random.key(self.o.seed), mini)
            state, metrics = self.program(state, batch, key)
        jax.block_until_ready(metrics)
        return state, metrics

    def rates(self, step: int, times: list[float]) -> dict[str, float]:
        return {
            "learning_rate": float(self.task.schedule(step - 1)),
            "bytes_sent": self.sent.until(step),
            "steps_per_second": 1 / float(np.median(times[-self.o.log_every :])),
        }

    def evaluate(self, state: State, step: int) -> dict[str, float]:
        scores = self.scored(state)
        self.log.write(step, scores | self.diagnosed(state.params, state.opt_state))
        return scores


def evaluator(
    task: Task, o: Options, mesh: Mesh
) -> Callable[[State], dict[str, float]]:
    """A function of the replicas: the scores of their mean on all that is held out."""
    same = processes.replicated(mesh)
    run = jax.jit(task.evaluate, out_shardings=same)
    size = o.batch_size * mesh.size

    def scores(state: State) -> dict[str, float]:
        joined = jax.tree.map(np.asarray, slamb_jax.consolidate(state[:2]))
        params, kept = processes.placed(same, joined)
        total: dict[str, float] = {}
        for batch in inputs.held_out(task.held_out, size):
            sums = run(params, kept, processes.split(mesh, batch))
            for name, x in sums.items():
                total[name] = total.get(name, 0.0) + float(x)
        weight = total.pop("weight")
        return {f"eval_{name}": x / weight for name, x in total.items()}

    return scores


def _note(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {x:.4g}" for name, x in metrics.items())
