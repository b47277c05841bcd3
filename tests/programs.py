"""What the tests of the programs share: tiny runs in this process and outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import slamb_jax
from examples.common import loop, processes, records

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def standard_promotion():
    """Flax's and optax's own code needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
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


def train(task, config):
    """A run on devices of this process."""
    return loop.run(task, config, processes.mesh_of(config.workers))


def stopping_at(step, monkeypatch):
    """SIGTERM comes to this process while that step is made."""
    one_step = loop._Loop.one_step

    def and_stop(self, program, state, stream, t):
        if t == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return one_step(self, program, state, stream, t)

    monkeypatch.setattr(loop._Loop, "one_step", and_stop)


def checkpoint(out):
    """The newest checkpoint's arrays, and where its data stood."""
    with slamb_jax.Checkpoints(out / "checkpoints") as checkpoints:
        about, arrays = checkpoints.load(checkpoints.latest())
    return arrays, about["extra"]


def numbers(out):
    """Its records without what depends on the clock."""
    found = records.read(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "steps_per_second"} for r in found]


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def start(module, *arguments, **environment):
    """A program in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT, env=env | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def result(out):
    return json.loads((out / "result.json").read_text())
