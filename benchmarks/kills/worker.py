"""One process of the run that is killed: it writes each event, with its time."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import slamb_jax
from benchmarks.train.tasks import chosen, task
from examples.common import AXIS
from examples.common.processes import on_mesh

BATCH, RATE, MOST = 16, 3e-3, 64
PACE = 0.1  # seconds that a step takes longer, as one of a larger model would
EXCHANGE = slamb_jax.Exchange(AXIS)
TASK = task("digits_alike")


@dataclasses.dataclass(frozen=True)
class Config:
    """The process, and the run that it is part of."""

    index: int
    count: int
    port: int
    snapshots: Path
    events: Path
    steps: int
    timeout: int
    seed: int


def start(steps: int, seed: int) -> tuple[Any, Any]:
    """A worker's state before the first step, and its step."""
    tx = slamb_jax.adamw(optax.cosine_decay_schedule(RATE, steps), EXCHANGE)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(TASK.loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = jax.jit(TASK.init)(jax.random.key(seed))
    return (params, tx.init(params)), step


def batch(step: int, seed: int, first: int, last: int) -> Any:
    """Images of these workers; a worker's are the same however many there are."""
    rng = np.random.default_rng([seed, step])
    rows = rng.choice(len(TASK.held_out["labels"]), MOST * BATCH)
    return chosen(TASK.held_out, rows[first * BATCH : last * BATCH])


def evaluate(state: Any) -> float:
    """The training loss of the mean of the replicas, on all images."""
    return float(jax.jit(TASK.loss)(slamb_jax.consolidate(state[0]), TASK.held_out))


def main(config: Config) -> None:
    """Trains from the latest snapshot to the last step, or until SIGTERM."""
    with config.events.open("a", buffering=1) as file:

        def say(event: str, **more: Any) -> None:
            file.write(json.dumps({"event": event, "at": time.time(), **more}) + "\n")

        jax.distributed.initialize(
            f"localhost:{config.port}",
            config.count,
            config.index,
            heartbeat_timeout_seconds=config.timeout,
        )
        mesh = Mesh(np.array(jax.devices()), (AXIS,))
        one, step = start(config.steps, config.seed)
        state = slamb_jax.replicate(one, mesh, EXCHANGE)
        run = slamb_jax.per_worker_step(step, mesh, EXCHANGE)
        snapshots, first = slamb_jax.Snapshots(config.snapshots), 0
        say("made")
        if found := snapshots.restore(state):
            first, state = found.step, found.state
        say("restored", step=first, new=found.newcomers if found else [])
        for t in range(first + 1, config.steps + 1):
            time.sleep(PACE)
            own = batch(t, config.seed, config.index, config.index + 1)
            inputs = on_mesh(mesh, own, AXIS)
            state, _ = jax.block_until_ready(run(state, inputs))
            snapshots.save(t, state)
            say("step", step=t)
            if multihost_utils.reached_preemption_sync_point(t - first):
                return
        say("ended", loss=evaluate(state))


if __name__ == "__main__":
    main(tyro.cli(Config))
