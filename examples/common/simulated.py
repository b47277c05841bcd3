"""Training runs whose n workers are simulated on one device.

For comparisons of optimizers on small models: every method starts from the same
parameters and sees the same batches. A program that trains a model across devices uses
:mod:`examples.common.loop` instead.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import slamb_jax
from examples.common import AXIS as AXIS
from examples.common.records import progress_bar
from slamb_jax import jointspar

DEFAULT = slamb_jax.Exchange(AXIS)
"""For methods that communicate on their own, which use only its axis."""
SAVED_EVERY = 600.0
"""Seconds between checkpoints of a run that can resume."""

Batch: TypeAlias = Any  # a tree of arrays with the examples along their first axis
State: TypeAlias = Any  # of all workers: parameters, optimizer state, peak rate


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and its data.

    ``loss(params, batch)`` is the mean loss of a batch; if the optimizer is JointSpar
    it is called as ``loss(params, batch, active)``. ``batches(size, steps, seed)``
    yields ``steps`` batches of ``size`` examples, for all workers together; the same
    for the same seed.
    """

    init: Callable[[jax.Array], optax.Params]
    loss: Callable[..., jax.Array]
    batches: Callable[[int, int, int], Iterator[Batch]]
    held_out: Batch
    unit: str = "nats"


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train: ``make(schedule, exchange)`` returns its transformation.

    The transformation is given one worker's own gradients. It averages them itself
    (``examples.common.optimizers.dense``) or exchanges something else (SLAMB, DiLoCo).
    """

    name: str
    make: Callable[[optax.Schedule, slamb_jax.Exchange], optax.GradientTransformation]
    exchange: slamb_jax.Exchange = DEFAULT


@dataclasses.dataclass(frozen=True)
class Run:
    """The result of a run; lists have an entry for each evaluation."""

    name: str
    rate: float
    seed: int
    steps: list[int]
    losses: list[float]  # of the mean of the replicas; nan once the run has diverged
    sent: list[float]  # bytes sent by each worker up to then; empty if not asked for
    seconds: list[float]  # in training steps up to then, without compilation
    step_seconds: float  # median
    # Of JointSpar, at each step: the share of workers in which each layer was active,
    # and the probabilities.
    active: list[dict[str, float]] = dataclasses.field(default_factory=list)
    probabilities: list[dict[str, float]] = dataclasses.field(default_factory=list)


class UnfinishedError(Exception):
    """A run was stopped in time, and goes on from its checkpoint."""


class Program:
    """A method's compiled training step on a task, for any peak rate and seed.

    ``step(state, batch)`` returns the new state, which replaces the old one (it is
    donated), and the draws of JointSpar. Compiled at the first call; the peak rate is
    part of the state, so a sweep over rates compiles once.

    Args:
      task: the model and its data.
      method: how to train it.
      workers: n, the number of simulated workers.
      batch: examples per worker and step.
      steps: the length of the run, which the learning-rate schedule follows.
      schedule: the learning rate over its peak; None: warm-up, then a cosine.
      mesh: devices to train on instead, one worker for each entry along the exchange's
        axis. None: simulate the workers on one device.
    """

    def __init__(
        self,
        task: Task,
        method: Method,
        *,
        workers: int,
        batch: int,
        steps: int,
        schedule: optax.Schedule | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.task, self.method, self.steps = task, method, steps
        self.workers, self.size = workers, workers * batch
        self._shape = schedule or optax.warmup_cosine_decay_schedule(
            0.0, 1.0, steps // 10, steps
        )
        self._mesh = mesh
        if mesh is None:
            self.step = slamb_jax.simulated_step(self._step, workers, method.exchange)
        else:
            self.step = slamb_jax.per_worker_step(self._step, mesh, method.exchange)
        self._loss = jax.jit(task.loss)
        self.compiled = False

    def start(self, rate: float, seed: int) -> State:
        """The state of all workers before the first step."""
        params = self.task.init(jax.random.key(seed))
        tx = self._optimizer(jnp.float32(rate))
        state = params, tx.init(params), jnp.float32(rate)
        if self._mesh is None:
            return slamb_jax.simulated_replicas(state, self.workers)
        return slamb_jax.replicate(state, self._mesh, self.method.exchange)

    def evaluate(self, state: State) -> float:
        """The loss of the mean of the replicas on the held-out batch."""
        params = slamb_jax.consolidate(state[0])
        return float(self._loss(params, self.task.held_out))

    def batches(self, seed: int) -> Iterator[Batch]:
        """The batches of a run, for all workers together."""
        return self.task.batches(self.size, self.steps, seed)

    def compile(self) -> float:
        """Makes a first step and an evaluation; returns the seconds they took."""
        began = time.perf_counter()
        state, _ = self.step(self.start(0.0, 0), next(self.batches(0)))
        self.evaluate(state)
        self.compiled = True
        return time.perf_counter() - began

    def _optimizer(self, rate: jax.Array) -> optax.GradientTransformationExtraArgs:
        tx = self.method.make(
            lambda count: rate * self._shape(count), self.method.exchange
        )
        return optax.with_extra_args_support(tx)

    def _step(self, state: State, batch: Batch) -> tuple[State, Any]:
        params, opt_state, rate = state
        extra: tuple[Any, ...] = ()
        drawn = None
        if isinstance(opt_state, jointspar.JointSparState):
            active = jointspar.active_layers(opt_state)
            extra, drawn = (active,), (active, jointspar.layer_probabilities(opt_state))

        # One worker's after the other's: few examples at once are faster on a CPU.
        gradient = jax.custom_batching.sequential_vmap(jax.grad(self.task.loss))
        grads = gradient(params, batch, *extra)
        updates, opt_state = self._optimizer(rate).update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, rate), drawn


def evaluation_steps(steps: int, evaluations: int, multiple: int = 1) -> list[int]:
    """Evenly spaced steps up to the last, rounded to a multiple."""
    ends = np.linspace(0, steps / multiple, evaluations + 1).round()[1:]
    return sorted({int(end) * multiple for end in ends} - {0})


def train(
    program: Program,
    rate: float,
    seed: int = 0,
    *,
    due: Sequence[int] | None = None,
    sent: Callable[[int], float] | None = None,
    show: bool = False,
    resume: Path | None = None,
    until: float = math.inf,
) -> Run:
    """Trains with one method from a seed, which fixes parameters and batches.

    Args:
      program: the compiled method.
      rate: the peak learning rate.
      seed: of the initial parameters and of the batches.
      due: the steps (from 1) after which to evaluate; None: ten, evenly spaced.
      sent: of a step t, the bytes that each worker has sent in the first t steps, such
        as ``examples.common.traffic.Traffic.until``. None: ``Run.sent`` is empty.
      show: a progress bar with the last loss.
      resume: a directory, where a checkpoint is kept every ten minutes; a run that was
        stopped goes on from there. None: nothing is kept.
      until: the ``time.monotonic()`` from which on a run that can resume is stopped.

    Returns:
      The losses, bytes and seconds. Training ends at the first evaluation whose loss is
      not finite; that loss and all later ones are nan.

    Raises:
      UnfinishedError: the run was stopped at ``until``; its checkpoint is there.
    """
    due = sorted(set(due or evaluation_steps(program.steps, 10)))
    if not program.compiled:
        program.compile()
    state = program.start(rate, seed)
    losses: list[float] = []
    times: list[float] = []
    seconds: list[float] = []
    drawn: list[Any] = []
    first = 0
    kept = slamb_jax.Checkpoints(resume) if resume else contextlib.nullcontext()
    name = f"{program.method.name:28}"
    with (
        kept as checkpoints,
        progress_bar(name, 0, program.steps, hidden=not show) as move,
    ):
        if checkpoints is not None and (found := checkpoints.restore(state)):
            first, state = found.step, found.state
            losses, times, seconds = found.extra["kept"]
        saved = time.monotonic()
        batches = itertools.islice(program.batches(seed), first, None)
        for t, batch in enumerate(batches, first + 1):
            began = time.perf_counter()
            state, about = jax.block_until_ready(program.step(state, batch))
            times.append(time.perf_counter() - began)
            if about is not None:
                drawn.append(jax.tree.map(lambda x: np.mean(x).item(), about))
            if t in due:
                loss = program.evaluate(state)
                losses.append(loss if math.isfinite(loss) else math.nan)
                seconds.append(sum(times))
            move(t, f"evaluation loss {losses[-1]:.3f}" if losses else "")
            if losses and math.isnan(losses[-1]):
                break
            stop = until <= time.monotonic() and t < program.steps
            late = stop or time.monotonic() > saved + SAVED_EVERY
            if checkpoints is not None and late:
                checkpoints.save(t, state, {"kept": [losses, times, seconds]})
                saved = time.monotonic()
                if stop:
                    raise UnfinishedError(f"stopped at step {t} of {program.steps}")
    missing = len(due) - len(losses)
    return Run(
        name=program.method.name,
        rate=rate,
        seed=seed,
        steps=list(due),
        losses=losses + [math.nan] * missing,
        sent=[sent(t) for t in due] if sent else [],
        seconds=seconds + seconds[-1:] * missing,
        step_seconds=float(np.median(times)),
        active=[active for active, _ in drawn],
        probabilities=[p for _, p in drawn],
    )
