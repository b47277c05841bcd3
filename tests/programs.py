"""What the tests of the programs share: tiny runs in this process and outside."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import slamb_jax
from examples.common import images, inputs, loop, processes, records

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@contextlib.contextmanager
def standard_promotion():
    """Flax's and optax's own code needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def standard():
    """For each test of a module that assigns it."""
    with standard_promotion():
        yield


@contextlib.contextmanager
def compiled_once(folder):
    """What is compiled inside is kept and not compiled again."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(folder), 0.1), strict=True):
        jax.config.update(name, value)
    reset_cache()
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
        reset_cache()


def config_of(train, name):
    """A program's configuration of that name."""
    file = EXAMPLES / train.__name__.split(".")[1] / "configs" / f"{name}.yaml"
    return loop.options.parse(train.Config, "", ["--config", str(file)])


def digits():
    """To train on, and ten to evaluate on."""
    train_on, test_on = images.digits()
    return train_on, inputs.Arrays(**{k: x[:10] for k, x in test_on.arrays.items()})


def train(task, config):
    """A run on devices of this process."""
    return loop.run(task, config, processes.mesh_of(config.workers))


def one_step(task, config):
    """The state before and after the first step of all workers, and its metrics."""
    mesh = processes.mesh_of(config.workers)
    params, kept = jax.jit(task.init)(jax.random.key(0))
    tx = loop.optimizer(config, task.schedule, task.decay_mask)
    start = loop.State(params, kept, tx.init(params))
    batch = next(inputs.training(task.source, config.batch_size, config.workers, 0))
    state = slamb_jax.replicate(start, mesh, config.exchange)
    step = loop.compiled_step(task, config, mesh)
    return start, *step(state, processes.split(mesh, batch), jax.random.key(0))


def stopping_at(step, monkeypatch):
    """SIGTERM reaches this process while that step is made."""
    one_step = loop._Loop.one_step

    def and_stop(self, state, stream, t):
        if t == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return one_step(self, state, stream, t)

    monkeypatch.setattr(loop._Loop, "one_step", and_stop)


def assert_same_run(a, b):
    """Alike to the last bit: state, position in the data, and all that is recorded."""
    one, two = checkpoint(a), checkpoint(b)
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(x, y)
    assert numbers(a) == numbers(b)


def checkpoint(out):
    """The newest checkpoint's arrays, and where its data stood."""
    with slamb_jax.Checkpoints(out / "checkpoints") as checkpoints:
        metadata, arrays = checkpoints.load(checkpoints.latest())
    return arrays, metadata["extra"]


def numbers(out):
    """Its records without what depends on the clock."""
    found = records.read(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "steps_per_second"} for r in found]


def series(out, name):
    """A metric at each step that has it."""
    return [r[name] for r in records.read(out / "metrics.jsonl") if name in r]


def start(*arguments, **environment):
    """A program in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT, env=env | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(*arguments, timeout=600, **environment):
    """What a program printed that ended well."""
    process = start(*arguments, **environment)
    try:
        told, wrong = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, wrong
    return told
