"""The training loop that all programs share."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

import slamb_jax
from examples.common import inputs, options, processes, records
from examples.common.diagnostics import diagnose
from examples.common.optimizers import Traffic, optimizer, traffic
from examples.common.options import Options

Variables = tuple[Any, Any]  # parameters, and what else a model keeps: BatchNorm's
STOPPED = 128 + 15  # the exit status of a run that SIGTERM stopped


@dataclasses.dataclass(frozen=True)
class Task:
    """What a program trains.

    ``loss`` is of one worker's batch and random key and also gives what the model keeps
    and further metrics. ``evaluate`` gives sums over a batch, among them ``"weight"``,
    by which the others are divided; examples have a weight each.
    """

    init: Callable[[jax.Array], Variables]
    loss: Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, tuple[Any, dict]]]
    evaluate: Callable[[Any, Any, Any], dict[str, jax.Array]]
    source: inputs.Source
    held_out: inputs.Source
    schedule: optax.Schedule
    steps: int
    augment: Callable[..., inputs.Example] | None = None
    decay_mask: Any = None


class State(NamedTuple):
    """Of a worker; in arrays of all workers, as ``slamb_jax.replicate`` makes them."""

    params: Any
    kept: Any
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run gave."""

    step: int
    metrics: dict[str, float]  # of the last evaluation
    bytes_sent: float  # by each worker, in all
    dense_bytes: float  # what averaging all gradients at every step would have sent
    step_seconds: float  # median of those since the last start

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The result of a run that is finished."""
        path = folder / "result.json"
        return cls(**json.loads(path.read_text())) if path.exists() else None


def make_step(task: Task, tx: optax.GradientTransformation) -> Callable[..., Any]:
    """A step of one worker; the gradient is its own, not an average."""

    def step(state: State, batch: Any, key: jax.Array) -> tuple[State, dict]:
        (loss, (kept, metrics)), grads = jax.value_and_grad(task.loss, has_aux=True)(
            state.params, state.kept, batch, key
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, kept, opt_state), {"loss": loss, **metrics}

    return step


def run(task: Task, o: Options, mesh: Mesh) -> Result:
    """Trains to the end, or to SIGTERM; goes on where a run in ``o.out`` stopped."""
    started = o.out / "options.yaml"
    if started.exists():
        options.check_same_run(o, started)
    if result := Result.read(o.out):
        return result
    if task.steps < 1:
        raise SystemExit("--epochs: not one step of all workers; ask for more")
    tx = optimizer(o, task.schedule, task.decay_mask)
    stream = inputs.training(task.source, o.batch_size, o.workers, o.seed, task.augment)
    params, kept = jax.jit(task.init)(jax.random.key(o.seed))
    state = State(params, kept, tx.init(params))
    state = slamb_jax.replicate(state, mesh, processes.AXIS)
    sent = traffic(o, params, mesh)
    kept_in = o.out / "checkpoints"
    with slamb_jax.Checkpoints(kept_in, asynchronous=True) as checkpoints:
        start = 0
        if found := checkpoints.restore(state):
            start, state, position = found
            stream.set_state(position)
        with (
            records.Records(o.out, start) as log,
            processes.Stop() as stop,
            slamb_jax.Watchdog(o.timeout) as watchdog,
        ):
            if jax.process_index() == 0:
                started.write_text(options.as_text(o))
            loop = _Loop(task, o, mesh, tx, sent, checkpoints, log, stop, watchdog)
            result = loop.train(state, stream, start)
    if result is None:
        raise SystemExit(STOPPED)
    if jax.process_index() == 0:
        text = json.dumps(dataclasses.asdict(result), indent=1)
        (o.out / "result.json").write_text(text + "\n")
    return result


def shapes(task: Task, o: Options, mesh: Mesh) -> tuple[State, Any, jax.Array]:
    """What the compiled step takes, in no memory."""
    tx = optimizer(o, task.schedule, task.decay_mask)
    key = jax.random.key(0)
    params, kept = jax.eval_shape(task.init, key)
    state = State(params, kept, jax.eval_shape(tx.init, params))

    def joined(x: Any, *lead: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype)

    batch = jax.tree.map(
        lambda x: joined(np.asarray(x), o.workers * o.batch_size), task.source[0]
    )
    return jax.tree.map(lambda x: joined(x, o.workers), state), batch, key


@dataclasses.dataclass
class _Loop:
    task: Task
    o: Options
    mesh: Mesh
    tx: optax.GradientTransformation
    sent: Traffic
    checkpoints: slamb_jax.Checkpoints
    log: records.Records
    stop: processes.Stop
    watchdog: slamb_jax.Watchdog

    def train(self, state: State, stream: Any, start: int) -> Result | None:
        """To the end; None if it was stopped, and saved."""
        o, last = self.o, self.task.steps
        diagnosed, evaluated = (
            diagnose(o, self.mesh),
            evaluator(self.task, o, self.mesh),
        )
        program = slamb_jax.per_worker_step(
            make_step(self.task, self.tx), self.mesh, processes.AXIS
        )
        mean = jax.jit(
            lambda x: jax.tree.map(lambda x: x.mean(), x),
            out_shardings=processes.everywhere(self.mesh),
        )
        scores: dict[str, float] = {}
        times: list[float] = []

        def evaluate(step: int) -> None:
            scores.update(evaluated(state))
            self.log.write(step, scores | diagnosed(state.params, state.opt_state))

        with records.progress_bar(o.optimizer, start, last) as show:
            for step in range(start + 1, last + 1):
                self.watchdog.beat(step)
                began = time.perf_counter()
                state, metrics = self.one_step(program, state, stream, step)
                times.append(time.perf_counter() - began)
                if step % o.log_every == 0 or step == last:
                    metrics = jax.tree.map(float, mean(metrics))
                    self.log.write(step, metrics | self.rates(step, times))
                    show(step, _note(metrics | scores))
                if step % o.eval_every == 0 or step == last:
                    evaluate(step)
                stopped = self.stop.at(step) and step < last
                if stopped or step % o.checkpoint_every == 0 or step == last:
                    self.checkpoints.save(step, state, inputs.position(stream))
                if stopped:
                    self.leave(step)
                    return None
            if not times:  # stopped after the last step and before the end
                evaluate(last)
            show(last, _note(scores))
        seconds = float(np.median(times[1:] or times or [0.0]))
        sent = self.sent.until(last), self.sent.dense * last
        return Result(last, scores, *sent, seconds)

    def one_step(
        self, program: Any, state: State, stream: Any, step: int
    ) -> tuple[State, Any]:
        """One update, done when this returns; reported is its last mini-step."""
        every = self.o.accumulate_steps
        for mini in range((step - 1) * every, step * every):
            batch = processes.split(self.mesh, next(stream))
            key = jax.random.fold_in(jax.random.key(self.o.seed), mini)
            state, metrics = program(state, batch, key)
        jax.block_until_ready(metrics)
        return state, metrics

    def rates(self, step: int, times: list[float]) -> dict[str, float]:
        return {
            "learning_rate": float(self.task.schedule(step - 1)),
            "bytes_sent": self.sent.until(step),
            "steps_per_second": 1 / float(np.median(times[-self.o.log_every :])),
        }

    def leave(self, step: int) -> None:
        self.checkpoints.wait()
        if jax.process_index() == 0:
            told = f"Stopped and saved at step {step}; the same command goes on."
            Console().print(told)


def evaluator(
    task: Task, o: Options, mesh: Mesh
) -> Callable[[State], dict[str, float]]:
    """A function of the replicas: the scores of their mean on all that is held out."""
    same = processes.everywhere(mesh)
    run = jax.jit(task.evaluate, out_shardings=same)
    size = o.batch_size * mesh.size

    def scores(state: State) -> dict[str, float]:
        joined = jax.tree.map(np.asarray, slamb_jax.consolidate(state[:2]))
        params, kept = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, same, lambda i: x[i]),
            joined,
        )
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


def summary(result: Result, o: Options) -> None:
    """The end of a run, on the terminal of process 0."""
    if jax.process_index() == 0:
        Console().print(
            f"{o.optimizer}: {_note(result.metrics)} after {result.step} steps; each "
            f"worker sent {result.bytes_sent / 2**20:.2f} MiB; "
            f"{result.step_seconds * 1000:.0f} ms per step. In {Path(o.out)}"
        )
