"""Starts the processes of a resumable run, ends them as asked, and cleans up."""

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 600.0  # seconds for any one launch; a busy machine is slow


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


class Launch:
    """``count`` processes of tests.resumable; what they say comes line by line."""

    def __init__(self, directory, count=4, **options):
        env = os.environ | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "default",
        }
        words = [
            word
            for name, value in options.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        directory.mkdir(parents=True, exist_ok=True)
        env["JAX_COMPILATION_CACHE_DIR"] = str(directory.parent / "compiled")
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        env["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        port = free_port()
        self.errors = [directory / f"stderr-{i}" for i in range(count)]
        self.lines: queue.Queue[tuple[int, str]] = queue.Queue()
        self.processes = []
        for i in range(count):
            with self.errors[i].open("w") as stderr:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.resumable", str(i), str(count),
                     str(port), str(directory), *words],
                    cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True,
                )  # fmt: skip
            self.processes.append(process)
            threading.Thread(target=self._read, args=(i,), daemon=True).start()

    def _read(self, i):
        with contextlib.suppress(ValueError):  # closed
            for line in self.processes[i].stdout:
                self.lines.put((i, line.strip()))

    def until(self, line, process=0):
        """Waits until that process says ``line``; False if it ends before."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            try:
                said = self.lines.get(timeout=0.05)
            except queue.Empty:
                if self.processes[process].poll() is not None:
                    return False
                continue
            if said == (process, line):
                return True
        raise TimeoutError(f"process {process} did not say {line!r}: {self.told()}")

    def kill(self, *which):
        for i in which or range(len(self.processes)):
            self.processes[i].kill()

    def statuses(self, timeout=LIMIT, waiting_for=None):
        """The exit statuses, of all or of some."""
        end = time.monotonic() + timeout
        chosen = range(len(self.processes)) if waiting_for is None else waiting_for
        return [
            self.processes[i].wait(max(0.1, end - time.monotonic())) for i in chosen
        ]

    def told(self):
        """What the processes said on standard error."""
        return [file.read_text() for file in self.errors]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()
        for process in self.processes:
            process.wait()
            process.stdout.close()
