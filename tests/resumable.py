"""A training program for several processes that may be killed and started again.

``python -m tests.resumable INDEX COUNT PORT DIRECTORY`` goes on from its snapshot in
the slot of its own, if ``--slots`` has names for all processes, or from the last sound
checkpoint, and prints each step, and the bits of its last state, on standard output.
"""

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from slamb_jax.checkpoint.format import leaves_by_name
from slamb_jax.workers.mesh import raw
from tests.optimizers import any_lamb, train_step
from tests.workers import on_mesh

SELECTION = slamb_jax.selections.Strided(0.25, min_size=20, seed=0)
PAPER = slamb_jax.Exchange("data", selection=SELECTION, payload=None, sync_every=4)
FEATURES, TARGETS = 24, 16


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("index", "count", "port"):
        parser.add_argument(name, type=int)
    parser.add_argument("directory", type=Path)
    numbers = {"steps": 12, "save-every": 3, "timeout": 10, "step-timeout": 600}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--slots", default=[], type=lambda names: names.split(","))
    parser.add_argument("--fail", default="")  # PROCESS:STEP:HOW
    return parser.parse_args()


say = functools.partial(print, flush=True)


def loss_of(params, batch):
    inputs, targets = jnp.split(batch, [FEATURES], axis=1)
    hidden = jnp.tanh(inputs @ params["w1"] + params["b"])
    return jnp.mean((hidden @ params["w2"] - targets) ** 2)


def make_step(tx):
    """With noise by a key of the state, and dropout by the key of the step."""

    def step(state, batch, key):
        params, opt_state, noise = state
        noise, own = jax.random.split(noise)
        noisy = batch + 1e-3 * jax.random.normal(own, batch.shape)
        noisy *= jax.random.bernoulli(key, 0.9, batch.shape)
        pair, loss = train_step(tx, loss_of)((params, opt_state), noisy)
        return (*pair, noise), loss

    return step


def start(tx):
    rng = np.random.default_rng(1)
    shapes = {"w1": (FEATURES, 32), "b": (32,), "w2": (32, TARGETS)}
    params = {k: jnp.float32(rng.normal(size=s) / 5) for k, s in shapes.items()}
    return params, tx.init(params), jax.random.key(2)


def kept_by(given):
    if given.slots:
        own = given.directory / given.slots[given.index]
        return contextlib.nullcontext(slamb_jax.Snapshots(own))
    return slamb_jax.Checkpoints(given.directory / "checkpoints")


def leave(kind, error, trace):
    """Ends at once; but for a broken link, of which jax will say whose end is gone."""
    sys.__excepthook__(kind, error, trace)
    if not issubclass(kind, jax.errors.JaxRuntimeError):
        os._exit(1)


def misbehave(how):
    if how == "raise":
        raise RuntimeError("the disk of this worker is gone")
    if how == "hang":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def train(given):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.05, 3, given.steps)
    exchange = slamb_jax.Exchange("data") if given.slots else PAPER
    inner = any_lamb(rate, exchange, mu_dtype="bfloat16" if given.slots else None)
    tx = slamb_jax.skip_not_finite(inner, exchange)
    run, state = on_mesh(make_step(tx), start(tx), mesh, exchange)
    begun, stream = 0, np.random.default_rng(3)
    with kept_by(given) as kept:
        if found := kept.restore(state):
            begun, state = found.step, found.state
            stream.bit_generator.state = found.extra["stream"]
        began = [begun, getattr(found, "newcomers", []), bits(state, stream)]
        for t in range(begun + 1, given.steps + 1):
            # The first step compiles.
            limit = given.step_timeout if t > begun + 1 else 600
            faulthandler.dump_traceback_later(limit, exit=True)
            at, _, how = given.fail.rpartition(":")
            fails = at == f"{given.index}:{t}"
            if fails and how != "unsaved":
                misbehave(how)
            batch = stream.normal(size=(8 * mesh.size, FEATURES + TARGETS))
            if t == 5:
                batch[3, 1] = np.nan  # of one worker: all skip the step
            key = jax.random.fold_in(jax.random.key(4), t)
            state, _ = jax.block_until_ready(run(state, batch.astype(np.float32), key))
            slamb_jax.check_finite(state, 3)
            if fails:
                misbehave(how)
            say("step", t)
            if t % given.save_every == 0:
                say("saving", t)
                kept.save(t, state, {"stream": stream.bit_generator.state})
                say("saved", t)
    if given.slots:
        slamb_jax.assert_replicas_agree(state[0])
    return *began, bits(state, stream)


def bits(state, stream):
    """Of each leaf, those on each device of this process; and where its data stand."""
    return {
        name: [np.asarray(shard.data).tobytes().hex() for shard in x.addressable_shards]
        for name, x in leaves_by_name(jax.tree.map(raw, state)).items()
    } | {"stream": [json.dumps(stream.bit_generator.state)]}


def main():
    given = arguments()
    sys.excepthook = leave
    jax.distributed.initialize(
        f"localhost:{given.port}",
        given.count,
        given.index,
        initialization_timeout=300,
        heartbeat_timeout_seconds=given.timeout,
    )
    say("result", json.dumps(train(given)))


if __name__ == "__main__":
    sys.exit(main())
