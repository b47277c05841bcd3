"""One process of the run that is killed: it writes each event, with its time."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slamb_jax
from benchmarks.train.tasks import FIFTH, MLP, images
from examples.common import AXIS

BATCH, RATE, MOST = 16, 3e-3, 64
PACE = 0.1  # seconds that a step takes longer, as one of a larger model would
EXCHANGE = slamb_jax.Exchange(AXIS)
NET = MLP()


@dataclasses.dataclass(frozen=True)
class Config:
    """The process, and the run that it is part of."""

    index: int
    count: int
    port: int
    snapshots: Path
    events: Path
    steps: int
    timeout: float
    seed: int


def loss_of(params: Any, x: Any, y: Any) -> jax.Array:
    """The mean cross-entropy of images."""
    logits: Any = NET.apply({"params": params}, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return jnp.mean(losses)


def start(steps: int, seed: int) -> tuple[Any, Any]:
    """A worker's state before the first step, and its step."""
    tx = slamb_jax.adamw(optax.cosine_decay_schedule(RATE, steps), EXCHANGE)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    @jax.jit
    def init() -> Any:
        params = NET.init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]
        return params, tx.init(params)

    return init(), step


def batch(step: int, seed: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of the first workers; a worker's are the same however many there are."""
    every = images(shuffled=True)
    rng = np.random.default_rng([seed, step])
    chosen = rng.choice(np.flatnonzero(~FIFTH), MOST * BATCH)[: workers * BATCH]
    return every["images"][chosen], every["labels"][chosen]


def evaluate(state: Any) -> float:
    """The training loss of the mean of the replicas, on all images."""
    every = images(shuffled=True)
    params = slamb_jax.consolidate(state[0])
    return float(
        jax.jit(loss_of)(params, every["images"][~FIFTH], every["labels"][~FIFTH])
    )


def main(config: Config) -> None:
    """Trains from the latest snapshot to the last step, or until SIGTERM."""
    with config.events.open("a", buffering=1) as file:

        def say(event: str, **more: Any) -> None:
            file.write(json.dumps({"event": event, "at": time.time(), **more}) + "\n")

        jax.distributed.initialize(
            f"localhost:{config.port}", config.count, config.index
        )
        say("joined")
        mesh = Mesh(np.array(jax.devices()), (AXIS,))
        one, step = start(config.steps, config.seed)
        state = slamb_jax.replicate(one, mesh, EXCHANGE)
        run = slamb_jax.per_worker_step(step, mesh, EXCHANGE)
        snapshots, first = slamb_jax.Snapshots(config.snapshots), 0
        say("made")
        with slamb_jax.Watchdog(config.timeout) as watchdog:
            if found := snapshots.restore(state):
                first, state = found.step, found.state
            say("restored", step=first, new=found.newcomers if found else [])
            there = NamedSharding(mesh, PartitionSpec(AXIS))
            here = slice(config.index * BATCH, (config.index + 1) * BATCH)
            for t in range(first + 1, config.steps + 1):
                watchdog.beat(t)
                time.sleep(PACE)
                inputs = tuple(
                    jax.make_array_from_process_local_data(there, x[here])
                    for x in batch(t, config.seed, config.count)
                )
                state, losses = jax.block_until_ready(run(state, inputs))
                loss = float(np.asarray(losses.addressable_data(0))[0])
                began = time.perf_counter()
                size = snapshots.save(t, state)
                seconds = time.perf_counter() - began
                say("step", step=t, loss=loss, save=seconds, bytes=size)
                if multihost_utils.reached_preemption_sync_point(t - first):
                    return
            say("ended", loss=evaluate(state))


if __name__ == "__main__":
    main(tyro.cli(Config))
