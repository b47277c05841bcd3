"""What the tests of the programs share: tiny runs in this process and outside."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint

from examples import train as trainer
from examples.common import inputs, processes, records

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EPOCH = 4 / 1438  # of the digits, in batches of 4: one step
WORDS = ["tensor", "worker", "momentum", "average", "layer", "gradient", "ratio"]


def train(program, config):
    """A run on digits, ten of them held out, on devices of this process."""
    train_on, test_on = inputs.digits()
    task = program.task(config, (train_on, test_on[:10]))
    return trainer.run(task, config, processes.mesh_of(config.workers))


def text_in(folder, files=25):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(files):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS, 60)))
    return folder


def series(out, name):
    """A metric at each step that has it."""
    return [r[name] for r in records.read(out / "metrics.jsonl") if name in r]


def saved(checkpoints):
    """The metadata of the latest checkpoint, and its arrays as they are stored."""
    latest = checkpoints / str(max(int(path.name) for path in checkpoints.iterdir()))
    metadata = json.loads((latest / "about" / "metadata").read_text())
    on_host = orbax.checkpoint.RestoreArgs(restore_type=np.ndarray)
    stored = orbax.checkpoint.PyTreeCheckpointer().restore(
        latest / "state", restore_args=dict.fromkeys(metadata["leaves"], on_host)
    )
    return metadata, stored


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


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def wait_until(condition, process=None, seconds=600.0):
    """Whether it comes to hold, before the process ends; a busy machine is slow."""
    end = time.monotonic() + seconds
    running = True
    while running and time.monotonic() < end:
        running = process is None or process.poll() is None
        if condition():
            return True
        time.sleep(0.01)
    return False


# How a program of several processes begins.
BEGIN = """
import json, os, pathlib, sys
import jax, jax.numpy as jnp, numpy as np, optax
import slamb_jax

index, count, port = map(int, sys.argv[1:4])
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", count, index)
assert jax.process_count() == count
found, mesh = {}, jax.make_mesh((jax.device_count(),), ("data",))
"""


class Launch:
    """``count`` processes of a program, and the files that hold what they say.

    Its first arguments are the number of the process, ``count`` and a port.
    """

    def __init__(self, directory, count, *command, words=(), devices=1):
        directory.mkdir(parents=True, exist_ok=True)
        env = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "default",
            # One of their own: they may be killed while they write it.
            "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled"),
        }
        self.output, self.errors, self.processes = [], [], []
        port = free_port()
        for i in range(count):
            self.output.append(directory / f"stdout-{i}")
            self.errors.append(directory / f"stderr-{i}")
            given = [sys.executable, *command, *map(str, (i, count, port, *words))]
            with self.output[i].open("w") as out, self.errors[i].open("w") as err:
                process = subprocess.Popen(given, env=env, stdout=out, stderr=err)
            self.processes.append(process)

    def until(self, line):
        """Whether the first process comes to say ``line``."""
        said = lambda: line in self.output[0].read_text().splitlines()  # noqa: E731
        return wait_until(said, self.processes[0])

    def kill(self, *which):
        for i in which or range(len(self.processes)):
            self.processes[i].kill()

    def statuses(self, but=None):
        """The exit statuses, when all have ended, or all but one."""
        return [x.wait(600) for i, x in enumerate(self.processes) if i != but]

    def told(self):
        """What the processes said on standard error."""
        return [file.read_text() for file in self.errors]

    def found(self):
        """What each said in the end, or None."""
        said = (file.read_text().partition("result ")[2] for file in self.output)
        return [json.loads(x.partition("\n")[0]) if x else None for x in said]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.statuses()


def resumable(directory, count, **options):
    """Processes of ``tests.resumable``."""
    words = [directory, *(f"--{name}={value}" for name, value in options.items())]
    command = "-m", "tests.resumable"
    return Launch(directory, count, *command, words=words)


def found_by(count, program, directory):
    """What processes with four devices in all find, which end well."""
    code = f"{BEGIN}{program}\nprint('result', json.dumps(found))"
    with Launch(directory / "run", count, "-c", code, devices=4 // count) as run:
        assert run.statuses() == [0] * count, run.told()
        return run.found()
