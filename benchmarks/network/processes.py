"""The workers' processes: started together, heard together, ended together."""

import collections
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TAIL = 30  # lines of a worker's output that are shown when something went wrong


class Workers:
    """Running workers; made by :func:`workers`."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.processes = processes
        # A worker's number and its report; None when it printed its last line.
        self._heard: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._tails = [collections.deque[str](maxlen=TAIL) for _ in processes]
        for i in range(len(processes)):
            threading.Thread(target=self._listen, args=(i,), daemon=True).start()

    def _listen(self, i: int) -> None:
        output = self.processes[i].stdout
        assert output
        with output:
            for line in output:
                if line.startswith("report "):
                    self._heard.put((i, json.loads(line.removeprefix("report "))))
                else:
                    self._tails[i].append(line.rstrip())
        self._heard.put((i, None))

    def measure(self, timeout: float, ask: str) -> list[dict[str, Any]]:
        """Has all workers do what a line asks for; one report from each."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):  # reports() will find out
                assert process.stdin
                print(ask, file=process.stdin, flush=True)
        return self.reports(timeout)

    def reports(self, timeout: float) -> list[dict[str, Any]]:
        """One report from each worker.

        Raises:
          RuntimeError: if a worker ends, or if one has not reported after ``timeout``
            seconds; with the last lines that the workers printed.
        """
        deadline = time.monotonic() + timeout
        reports: dict[int, dict[str, Any]] = {}
        while silent := sorted(set(range(len(self.processes))) - set(reports)):
            try:
                i, report = self._heard.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                what = f"workers {silent} were silent for {timeout:.0f} s"
                raise self._failure(what) from None
            if report is None:
                raise self._failure(f"worker {i} ended ({self.processes[i].wait()})")
            reports[i] = report
        return [report for _, report in sorted(reports.items())]

    def _failure(self, what: str) -> RuntimeError:
        tails = [
            f"worker {i} printed:\n" + "\n".join(tail)
            for i, tail in enumerate(self._tails)
            if tail
        ]
        return RuntimeError("\n".join([what, *tails]))


@contextlib.contextmanager
def workers(commands: Sequence[Sequence[str]]) -> Iterator[Workers]:
    """Starts the commands in the repository's root; kills those still running."""
    # A worker has one device, and reaches the others without a proxy.
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    env = kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=env, text=True, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )  # fmt: skip
        yield Workers(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin
                process.stdin.close()


def worker_command(coordinator: str, workers: int, index: int) -> list[str]:
    words = coordinator, str(workers), str(index)
    return [sys.executable, "-m", "benchmarks.network.worker", *words]
