"""One host's process: trains with every optimizer in turn and reports what it took.

Started by ``benchmarks.network``, which writes the rounds to measure to its standard
input, a number a line, and reads one line of JSON for each.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from benchmarks.network.counters import Counters
from examples.byte_lm import data
from examples.byte_lm.model import ByteLM, next_byte_loss
from slamb_jax._collectives import mean_over

AXIS = "data"


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker needs to know; travels as JSON."""

    workers: int
    layers: int
    width: int
    context: int  # bytes of text a step and worker
    compress_ratio: float
    sync_every: int
    dense_steps: int  # of each dense program in a round
    seed: int
    coordinator: str
    interface: str


def dense(dtype: Any) -> optax.GradientTransformation:
    """LAMB on gradients that are averaged over the workers in that dtype."""

    def mean(grads: optax.Updates, _: Any) -> optax.Updates:
        leaves, treedef = jax.tree.flatten(grads)
        means = mean_over([g.astype(dtype) for g in leaves], AXIS)
        return treedef.unflatten([m.astype(jnp.float32) for m in means])

    return optax.chain(optax.stateless(mean), optax.lamb(1e-3))


def slamb(job: Job, axis_name: str | None) -> optax.GradientTransformation:
    return slamb_jax.slamb(
        1e-3,
        axis_name=axis_name,
        compress_ratio=job.compress_ratio,
        sync_every=job.sync_every,
    )


class Program:
    """A training step with one optimizer, its state, and what its compiler says."""

    def __init__(self, tx: optax.GradientTransformation, job: Job, mesh: Any):
        model = ByteLM(job.layers, job.width, 4, job.context)
        self.shape = (job.workers, job.context + 1)
        first = jnp.zeros((1, job.context), jnp.int32)
        params = model.init(jax.random.key(job.seed), first)["params"]

        def step(state: tuple, text: jax.Array) -> tuple[tuple, jax.Array]:
            params, opt_state = state
            loss, grads = jax.value_and_grad(lambda p: next_byte_loss(model, p, text))(
                params
            )
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        self.state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
        self.run = slamb_jax.per_worker_step(step, mesh, AXIS)
        like = jax.ShapeDtypeStruct(self.shape, jnp.int32)
        self.wire = slamb_jax.wire_report(self.run.lower(self.state, like))
        self.loss = float("nan")

    def step(self, text: np.ndarray) -> float:
        """One step; the seconds it took here."""
        start = time.perf_counter()
        self.state, losses = jax.block_until_ready(self.run(self.state, text))
        seconds = time.perf_counter() - start
        self.loss = float(losses.addressable_shards[0].data[0])
        return seconds


class Barrier:
    """An all-reduce of one number: nobody leaves before everybody came."""

    def __init__(self, mesh: Any):
        self.state = slamb_jax.replicate(jnp.zeros(1), mesh, AXIS)
        self.run = slamb_jax.per_worker_step(
            lambda x, _: (slamb_jax.average_parameters(x, AXIS), ()), mesh, AXIS
        )

    def __call__(self) -> float:
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.run(self.state, ()))
        return time.perf_counter() - start


def programs(job: Job, mesh: Any) -> dict[str, Program]:
    """Every optimizer as it is, and the two updates with nothing sent."""
    chains = {
        "LAMB, float32": dense(jnp.float32),
        "LAMB, bfloat16": dense(jnp.bfloat16),
        "SLAMB": slamb(job, AXIS),
        "LAMB, alone": optax.lamb(1e-3),
        "SLAMB, alone": slamb(job, None),
    }
    return {name: Program(tx, job, mesh) for name, tx in chains.items()}


def block(
    program: Program, steps: int, barrier: Barrier, texts: Any, interface: str
) -> dict[str, Any]:
    """So many steps, each from a barrier, and what crossed the interface meanwhile."""
    barrier()
    before = Counters.read(interface)
    seconds = []
    for _ in range(steps):
        barrier()
        seconds.append(program.step(next(texts)))
    barrier()
    crossed = Counters.read(interface) - before
    return {"seconds": seconds, "loss": program.loss} | dataclasses.asdict(crossed)


def main(job: Job, index: int) -> None:
    jax.distributed.initialize(job.coordinator, job.workers, index)
    mesh = jax.make_mesh((job.workers,), (AXIS,))
    text, _ = data.load(data.standard_library(), job.context)
    texts = data.batches(text, job.workers, job.context, 10**6, job.seed)
    barrier, all_programs = Barrier(mesh), programs(job, mesh)
    steps = {
        name: job.sync_every if name == "SLAMB" else job.dense_steps
        for name in all_programs
    }

    def measure() -> dict[str, Any]:
        blocks = {
            name: block(program, steps[name], barrier, texts, job.interface)
            for name, program in all_programs.items()
        }
        return {"blocks": blocks, "barriers": [barrier() for _ in range(20)]}

    measure()  # compiles, and starts every connection
    wires = {
        name: {
            "text": str(program.wire),
            "collectives": [dataclasses.asdict(c) for c in program.wire.collectives],
            "bytes": program.wire.bytes_sent(),
            "sync_bytes": program.wire.bytes_sent(conditional=True),
        }
        for name, program in all_programs.items()
    }
    sizes = [x.size // job.workers for x in jax.tree.leaves(all_programs["SLAMB"].state[0])]
    say({"wires": wires, "parameters": sum(sizes), "leaves": len(sizes)})
    for line in sys.stdin:
        for _ in range(int(line)):
            say(measure())


def say(what: dict[str, Any]) -> None:
    print("report", json.dumps(what), flush=True)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))
