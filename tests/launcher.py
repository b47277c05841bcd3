"""Starts the processes of a resumable run, ends them as asked, and cleans up."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 600.0  # seconds for any one launch; a busy machine is slow


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


class Launch:
    """``count`` processes of tests.resumable, and the files that hold what they say."""

    def __init__(self, directory, count, **options):
        directory.mkdir(parents=True, exist_ok=True)
        env = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "default",
            "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        words = [f"--{k.replace('_', '-')}={value}" for k, value in options.items()]
        port = free_port()
        self.errors = [directory / f"stderr-{i}" for i in range(count)]
        self.output = [directory / f"stdout-{i}" for i in range(count)]
        self.processes = []
        for i in range(count):
            with self.errors[i].open("w") as stderr, self.output[i].open("w") as stdout:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.resumable", str(i), str(count),
                     str(port), str(directory), *words],
                    cwd=ROOT, env=env, stdout=stdout, stderr=stderr,
                )  # fmt: skip
            self.processes.append(process)

    def until(self, line, process=0):
        """Waits until that process says ``line``; False if it ends before."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            ended = self.processes[process].poll() is not None
            if line in self.output[process].read_text().splitlines():
                return True
            if ended:
                return False
            time.sleep(0.01)
        raise TimeoutError(f"process {process} did not say {line!r}: {self.told()}")

    def kill(self, *which):
        for i in which or range(len(self.processes)):
            self.processes[i].kill()

    def statuses(self, waiting_for=None):
        """The exit statuses, of all or of some."""
        chosen = range(len(self.processes)) if waiting_for is None else waiting_for
        return [self.processes[i].wait(LIMIT) for i in chosen]

    def told(self):
        """What the processes said on standard error."""
        return [file.read_text() for file in self.errors]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()
        self.statuses()
