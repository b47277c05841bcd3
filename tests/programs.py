"""What the tests of the programs share: tiny runs in this process and outside."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from examples.common import images, inputs, loop, processes, records

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EPOCH = 4 / 1438  # of the digits, in batches of 4: one step
WORDS = ["tensor", "worker", "momentum", "average", "layer", "gradient", "ratio"]


def train(program, config):
    """A run on digits, ten of them held out, on devices of this process."""
    train_on, test_on = images.digits()
    test_on = inputs.Arrays(**{k: x[:10] for k, x in test_on.arrays.items()})
    task = program.task(config, (train_on, test_on))
    return loop.run(task, config, processes.mesh_of(config.workers))


def text_in(folder, files=25):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(files):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS, 60)))
    return folder


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


def finish(process, timeout=600):
    """Its status and all that it printed; nothing that it started is left."""
    try:
        told = "".join(process.communicate(timeout=timeout))
        return process.returncode, told
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # nor is a pipe left open


def ended(*arguments, timeout=600, **environment):
    """What a program printed that ended well."""
    status, told = finish(start(*arguments, **environment), timeout)
    assert status == 0, told
    return told
