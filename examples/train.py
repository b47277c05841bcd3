"""Trains across devices and processes: the root of the programs beside it.

``python -m examples.train`` trains a small network on handwritten digits, in half a
minute. BERT, the ResNet and Swin are this program with a :class:`Task` and options of
their own. ``launch/`` starts it in several processes.
"""

import contextlib
import dataclasses
import faulthandler
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

import slamb_jax
from examples.common import AXIS, inputs, options, processes
from examples.common.optimizers import optimizer
from examples.common.options import Options
from examples.common.records import progress_bar, records

Batch: TypeAlias = dict[str, jax.Array]
Scores: TypeAlias = dict[str, jax.Array]


class Task(NamedTuple):
    """A model, its data and its schedule: what a program adds to this one.

    ``init(key)`` returns parameters and statistics. ``scores(params, statistics, batch,
    key)`` returns numbers of each example, among them ``"loss"``, and new statistics;
    to evaluate, its key is None. Both are of one worker.
    """

    init: Callable[[jax.Array], tuple[optax.Params, Any]]
    scores: Callable[[optax.Params, Any, Batch, jax.Array | None], tuple[Scores, Any]]
    source: inputs.Source
    held_out: inputs.Source
    schedule: optax.Schedule
    steps: int
    augment: inputs.Augment | None = None
    decay_mask: Callable[[optax.Params], optax.Params] | None = None


class State(NamedTuple):
    """Of a worker; in arrays of all workers, as ``slamb_jax.replicate`` makes them."""

    params: optax.Params
    statistics: Any
    opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """A network of one hidden layer, and scikit-learn's handwritten digits."""

    steps: int = 300
    width: int = 256


def digits(o: Config) -> Task:
    """A network of one hidden layer that classifies scikit-learn's digits."""
    net = nn.Sequential([nn.LayerNorm(), nn.Dense(o.width), nn.relu, nn.Dense(10)])
    train, held_out = inputs.digits()

    def scores(params: Any, statistics: Any, batch: Batch, key: Any) -> Any:
        pixels = batch["image"].reshape(-1, 64)
        return classified(net.apply(params, pixels), batch["label"]), statistics

    return Task(
        init=lambda key: (net.init(key, jnp.zeros((1, 64))), ()),
        scores=scores,
        source=train,
        held_out=held_out,
        schedule=optax.cosine_decay_schedule(o.learning_rate, o.steps),
        steps=o.steps,
    )


def steps_per_epoch(source: inputs.Source, o: Options) -> float:
    """Steps of all workers together that see as many examples as there are."""
    return len(source) / (o.batch_size * o.accumulate_steps * o.workers)


def classified(logits: Any, labels: jax.Array, smoothing: float = 0.0) -> Scores:
    """Each example's cross-entropy, and whether its class was found, in percent."""
    logits = logits.astype(jnp.float32)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), smoothing)
    is_right = jnp.argmax(logits, -1) == labels
    return {
        "loss": optax.softmax_cross_entropy(logits, targets),
        "accuracy": 100 * is_right.astype(jnp.float32),
    }


def compiled_step(
    task: Task, tx: optax.GradientTransformationExtraArgs, o: Options, mesh: Mesh
) -> Any:
    """The step of all workers, ``(state, batch, key)``, to call or to lower."""

    def step(state: State, batch: Batch, key: jax.Array) -> tuple[State, Scores]:
        def loss(params: optax.Params) -> tuple[jax.Array, Any]:
            scores, statistics = task.scores(params, state.statistics, batch, key)
            means = jax.tree.map(jnp.mean, scores)
            return means["loss"], (means, statistics)

        # Of this worker alone: the exchange is in the optimizer.
        grads, (means, statistics) = jax.grad(loss, has_aux=True)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, statistics, opt_state), means

    # Each worker has statistics of its own, whose mean is evaluated.
    warnings.filterwarnings("ignore", r".* workers differ in state\.statistics")
    return slamb_jax.per_worker_step(step, mesh, o.exchange)


def evaluator(
    task: Task, o: Options, mesh: Mesh
) -> Callable[[State], dict[str, float]]:
    """A function of the replicas: the scores of their mean on all that is held out."""

    def weighted(params: optax.Params, statistics: Any, batch: Batch) -> Scores:
        scores, _ = task.scores(params, statistics, batch, None)
        return {name: jnp.sum(batch["weight"] * x) for name, x in scores.items()}

    sums = jax.jit(weighted, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def evaluate(state: State) -> dict[str, float]:
        mean = jax.tree.map(np.asarray, slamb_jax.consolidate(state[:2]))
        params, statistics = processes.on_mesh(mesh, mean)
        total: dict[str, float] = {}
        for batch in inputs.held_out(task.held_out, o.batch_size * mesh.size):
            split = processes.on_mesh(mesh, batch, AXIS)
            for name, x in sums(params, statistics, split).items():
                total[name] = total.get(name, 0.0) + float(x)
        return {f"eval_{name}": x / len(task.held_out) for name, x in total.items()}

    return evaluate


def run(task: Task, o: Options, mesh: Mesh) -> dict[str, float]:
    """Trains to the end or to a signal; resumes a run that was stopped in ``o.out``.

    Returns the numbers that its log has of the last step.
    """
    started, last = o.out / "options.yaml", task.steps
    if started.exists():
        options.check_same_run(o, started)
    if last < 1:
        raise SystemExit("--epochs: not one step of all workers; ask for more")
    title = f"{o.optimizer}, dense" if o.dense else o.optimizer
    tx = optimizer(o, task.schedule, task.decay_mask)
    key = jax.random.key(o.seed)
    params, statistics = jax.jit(task.init)(key)
    state = State(params, statistics, tx.init(params))
    state = slamb_jax.replicate(state, mesh, o.exchange)
    stream = inputs.training(task.source, o.batch_size, o.workers, o.seed, task.augment)
    train_step, evaluate = compiled_step(task, tx, o, mesh), evaluator(task, o, mesh)
    exchanged = slamb_jax.exchange_metrics(o.exchange, params)
    console, folder = Console(quiet=jax.process_index() > 0), o.out / "checkpoints"
    checkpoints = slamb_jax.Checkpoints(folder, asynchronous=True)
    with checkpoints, contextlib.ExitStack() as stack:
        snapshots = slamb_jax.Snapshots(o.snapshots) if o.snapshots else None
        found: Any = snapshots.restore(state) if snapshots else None
        if found and found.step >= (checkpoints.latest() or 0):
            new = found.newcomers or "none"
            console.print(f"step {found.step} from snapshots, new workers: {new}")
        else:
            found = checkpoints.restore(state, workers=o.workers)
        first = found.step if found else 0
        if found:
            state = found.state
            inputs.resume(stream, found.extra, o.workers)
        log = stack.enter_context(records(o.out, first))
        stop = stack.enter_context(processes.stopping())
        show = stack.enter_context(progress_bar(title, first, last))
        if jax.process_index() == 0:
            started.write_text(options.as_text(o))
        times: list[float] = []
        numbers: dict[str, float] = {}
        scores: dict[str, float] = {}
        for step in range(first + 1, last + 1):
            if jax.process_count() > 1:  # or else they would wait for one that hangs
                faulthandler.dump_traceback_later(o.step_timeout, exit=True)
            began = time.perf_counter()
            for mini in range(o.accumulate_steps):
                batch = processes.on_mesh(mesh, next(stream), AXIS)
                own = jax.random.fold_in(key, (step - 1) * o.accumulate_steps + mini)
                state, means = train_step(state, batch, own)
            jax.block_until_ready(means)
            times.append(time.perf_counter() - began)
            is_last = step == last
            if step % o.log_every == 0 or is_last:
                numbers |= {name: float(x.mean()) for name, x in means.items()}
                numbers["learning_rate"] = float(task.schedule(step - 1))
                numbers["seconds_per_step"] = float(np.median(times[-o.log_every :]))
                log(step, numbers)
            if step % o.eval_every == 0 or is_last:
                scores = evaluate(state) | ({} if o.dense else exchanged(state))
                log(step, scores)
            losses = {k: x for k, x in (numbers | scores).items() if "loss" in k}
            show(step, note(losses))
            status = 0 if is_last else stop(step - first)
            at = inputs.position(stream, o.workers)
            if snapshots and (status or step % o.snapshot_every == 0):
                snapshots.save(step, state, at)
            if status or step % o.checkpoint_every == 0 or is_last:
                checkpoints.save(step, state, at)
            if status:
                checkpoints.wait()
                told = "the same command resumes"
                console.print(f"Stopped and saved at step {step}; {told}.")
                raise SystemExit(status)
        if not times:  # stopped after the last step and before the end
            scores = evaluate(state)
    return numbers | scores


def note(numbers: dict[str, float]) -> str:
    """A line of numbers."""
    return ", ".join(f"{name} {x:.4g}" for name, x in numbers.items())


def main(
    kind: type[Any], make_task: Callable[[Any], Task], description: str | None
) -> None:
    """Runs a program with the options of the command line."""
    o = options.parse(kind, description or "")
    mesh = processes.start(o)
    numbers = run(make_task(o), o, mesh)
    if jax.process_index() == 0:
        Console().print(f"{note(numbers)}. In {o.out}")


if __name__ == "__main__":
    main(Config, digits, __doc__)
