"""Runs a program in several processes on one machine, also after one of them is lost.

    python examples/launch/elastic.py --processes 3 bert --files DIR

The program is an example's name, or a module: ``my.train`` is run as ``python -m
my.train`` with the options after it and ``--workers``, ``--coordinator``,
``--num-processes``, ``--process-id`` and ``--snapshots DIR``. On SIGTERM it must save
and end with status 143, as the guide's loop does.

If a process is killed or stops, the others start again at once without it, from the
snapshots that each keeps of its own workers in memory. The one that was lost is taken
in again after ``--back`` seconds, on SIGUSR1 to this script ("a worker is back"), or at
the next loss. SIGTERM saves and stops all, with status 143; the same command resumes.
"""

import argparse
import math
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

KILLED = -signal.SIGKILL
SAVED = {130, 143, -signal.SIGTERM}  # stopped by a signal, and saved if it had begun
ENDED = {0, 2, *SAVED}  # all others: start again, the rule of restart.sh
HANGS = 30.0  # seconds in which all end after a first one, but one that has stopped

asked: set[int] = set()  # signals to this script
Running = dict[int, subprocess.Popen[bytes]]


def main() -> int:
    """Runs the program to its end; returns its exit status."""
    options, program = arguments()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: asked.add(number))
    every = list(range(options.processes))
    here, losses = every, 0
    while True:
        asked.discard(signal.SIGUSR1)
        running = start(here, options, program)
        watch(running, options.snapshots, math.inf if here == every else options.back)
        lost, status = ended(running)
        stopped = bool(asked & {signal.SIGTERM, signal.SIGINT})
        if status not in ENDED and losses < options.losses and not stopped:
            losses += 1
            here = [slot for slot in every if slot not in lost] or every
            print(f"lost {lost}, {here} go on", file=sys.stderr, flush=True)
        elif status in SAVED and not stopped:
            here = every
            print(f"{here} go on, all of them", file=sys.stderr, flush=True)
        else:
            return 128 - status if status < 0 else status


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the program with its own."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--workers-each", type=int, default=1)
    parser.add_argument("--snapshots", type=Path, default=Path("/dev/shm/slamb"))
    parser.add_argument("--back", type=float, default=60.0, help="seconds")
    parser.add_argument("--losses", type=int, default=20, help="to survive, at most")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.program:
        parser.error("name a program: cifar10, bert, swin or a module")
    return options, options.program


def start(slots: list[int], options: argparse.Namespace, program: list[str]) -> Running:
    """One process for each slot, which has a folder for snapshots."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    name, *rest = program
    module = name if "." in name else f"examples.{name}.main"
    words = [sys.executable, "-m", module, *rest]
    words += ["--workers", str(len(slots) * options.workers_each)]
    words += ["--coordinator", f"localhost:{port}", "--num-processes", str(len(slots))]
    running = {}
    for i, slot in enumerate(slots):
        own = ["--process-id", str(i), "--snapshots", options.snapshots / str(slot)]
        running[slot] = subprocess.Popen([*words, *own])
    return running


def watch(running: Running, snapshots: Path, back: float) -> None:
    """Returns when all have ended, or one has failed; stops them where that is due.

    That is ``back`` seconds after a first snapshot: a job is not stopped that has not
    yet taken a step.
    """
    began, due, told = time.time(), math.inf, False  # due: the signal, then its effect
    while any(process.poll() is None for process in running.values()):
        if any(p.poll() not in {None, 0, *SAVED} for p in running.values()):
            return
        if due == math.inf and not told:
            files = snapshots.glob("*/*.snapshot")
            if any(file.stat().st_mtime > began for file in files):
                due = time.monotonic() + back
        if not told and (asked or time.monotonic() > due):
            told, due = True, time.monotonic() + HANGS
            for process in running.values():
                process.send_signal(signal.SIGTERM)
        elif told and time.monotonic() > due:
            due = math.inf
            line = f"SIGTERM was sent {HANGS:g} s ago, and no process has ended"
            print(line, file=sys.stderr, flush=True)
        time.sleep(0.05)


def ended(running: Running) -> tuple[list[int], int]:
    """The slots whose processes were lost, and the status of all; ends those left."""
    end = time.monotonic() + HANGS
    while True:
        statuses = {slot: process.poll() for slot, process in running.items()}
        left = [slot for slot, status in statuses.items() if status is None]
        codes = {0, *statuses.values()} - {None}
        # One that is left has stopped.
        if KILLED in codes or len(left) <= 1 or time.monotonic() > end:
            break
        time.sleep(0.05)
    for process in running.values():
        process.kill()
        process.wait()
    lost = [slot for slot, status in statuses.items() if status == KILLED] or left
    status = next(iter(codes - ENDED or codes - {0} or {0}))
    return lost, int(status or 0)


if __name__ == "__main__":
    sys.exit(main())
