"""What the tests of the programs share: tiny runs in this process and outside."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import slamb_jax
from examples.common import images, inputs, loop, processes, records
from tests.close import assert_same_bits

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


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


def stopping_at(step, monkeypatch, number=signal.SIGTERM):
    """The signal reaches this process while that step is made."""
    one_step = loop._Loop.one_step

    def and_stop(self, state, stream, t):
        if t == step:
            os.kill(os.getpid(), number)
        return one_step(self, state, stream, t)

    monkeypatch.setattr(loop._Loop, "one_step", and_stop)


def assert_same_run(a, b):
    """Alike to the last bit: state, position in the data, and all that is recorded."""
    (one, where), (two, there) = checkpoint(a), checkpoint(b)
    assert_same_bits(one, two)
    assert (where, numbers(a)) == (there, numbers(b))


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


def start(*arguments, program=sys.executable, **environment):
    """A program in a session of its own."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [program, *map(str, arguments)],
        cwd=ROOT, env=env | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
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
