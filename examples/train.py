"""A whole program to copy, for one process or several (launch/two_processes.sh)."""

import signal
from typing import NamedTuple

import flax.linen as nn
import grain
import jax
import optax
import tyro
from flax.training.train_state import TrainState
from jax.experimental.multihost_utils import reached_preemption_sync_point
from rich.progress import track
from sklearn.datasets import load_digits

import slamb_jax


class Options(NamedTuple):
    steps: int = 300
    every: int = 50  # steps from one evaluation and checkpoint to the next
    out: str = "runs/train"  # of checkpoints, from which it resumes
    workers: int = 4  # devices, in all processes together; it may resume with others
    coordinator: str | None = None  # host:port of process 0
    process_id: int = 0
    num_processes: int = 1


def main(o: Options) -> None:
    jax.config.update("jax_num_cpu_devices", o.workers // o.num_processes)
    signals: list[int] = []
    if o.num_processes > 1:  # jax handles SIGTERM
        jax.distributed.initialize(o.coordinator, o.num_processes, o.process_id)
    else:
        signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    mesh = jax.make_mesh((o.workers,), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    joined = jax.make_array_from_process_local_data  # of the shares of all processes
    images, labels = load_digits(return_X_y=True)
    digits = grain.MapDataset.source(list(zip(images[360:], labels[360:], strict=True)))
    batches = digits.seed(0).shuffle().repeat().batch(32 * o.workers // o.num_processes)
    data = iter(batches[o.process_id :: o.num_processes].to_iter_dataset())
    net = nn.Sequential([nn.LayerNorm(), nn.Dense(256), nn.relu, nn.Dense(10)])
    params = net.init(jax.random.key(0), images[:1])
    exchange = slamb_jax.Exchange("data")
    tx = slamb_jax.adamw(optax.cosine_decay_schedule(0.003, o.steps), exchange)
    state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)
    state = slamb_jax.replicate(state, mesh, exchange)

    def loss_of(params: optax.Params, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = net.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train_step(state: TrainState, batch: list) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state.params, *batch)
        return state.apply_gradients(grads=grads), loss  # of one worker: no pmean

    run = slamb_jax.per_worker_step(train_step, mesh, exchange)
    evaluate = jax.jit(lambda params: loss_of(params, images[:360], labels[:360]))
    metrics = slamb_jax.exchange_metrics(exchange, params)
    with slamb_jax.Checkpoints(o.out) as checkpoints, slamb_jax.Watchdog(60):
        found = checkpoints.restore(state, workers=o.workers)
        first, state, at = found or (0, state, data.get_state())
        data.set_state(at)
        steps = range(first + 1, o.steps + 1)
        for step in track(steps, f"from step {first + 1}", disable=o.process_id > 0):
            batch = [joined(split, x) for x in next(data)]
            state, losses = jax.block_until_ready(run(state, batch))
            stop = signals or reached_preemption_sync_point(step - first)
            if stop or step % o.every == 0 or step == o.steps:
                checkpoints.save(step, state, data.get_state())
                log = {"step": step, "loss": losses.mean(), **metrics(state)}
                log["evaluation"] = evaluate(slamb_jax.consolidate(state).params)
                if o.process_id == 0:
                    print(", ".join(f"{name} {x:.4g}" for name, x in log.items()))
            if stop:
                raise SystemExit(143)  # the launchers know that it has saved


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
