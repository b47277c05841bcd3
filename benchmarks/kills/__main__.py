"""Kills processes of a run at random, and measures what each loss costs.

Run from the root of the repository: ``python -m benchmarks.kills``. An MLP of
64-128-128-10 on digits in three processes, each with a worker, and with snapshots
in memory at every step. Again and again one of them, also the first, gets SIGKILL at a
random time; with its host its snapshots are gone. jax ends the others, which
start again without it, are stopped some steps later, and start with a new one in its
place. Then the same job without kills. Last, simulated on one device: the job in which
a worker loses its momentum, and nothing else, at as many steps, and the same without.
"""

import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.kills.worker import EXCHANGE, batch, evaluate, start
from examples.common.tables import table
from examples.hardware import hardware

Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """The run and its kills."""

    processes: int = 3
    steps: int = 400
    kills: int = 20
    timeout: int = 3
    """Seconds after which jax takes a silent process to be gone."""
    seed: int = 0
    seeds: int = 8
    """Of the simulated runs."""
    memory: Path = Path("/dev/shm")
    out: Path = Path("benchmarks/kills/kills.jsonl")


class Job:
    """The processes of one start, by slot, and the events that they write."""

    def __init__(self, slots: list[int], config: Config, folder: Path) -> None:
        self.began = time.time()
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        port, kept = random.randrange(20_000, 30_000), ("steps", "timeout", "seed")
        words = {"count": len(slots), "port": port}
        words |= {name: getattr(config, name) for name in kept}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.files = {s: folder / f"{time.time_ns()}-{s}.jsonl" for s in slots}
        for i, slot in enumerate(slots):
            own = {"index": i, "snapshots": folder / str(slot)}
            own |= {"events": self.files[slot], **words}
            line = [f"--{name}={value}" for name, value in own.items()]
            command = [sys.executable, "-m", "benchmarks.kills.worker", *line]
            with (folder / f"stderr-{slot}").open("a") as errors:
                self.processes[slot] = subprocess.Popen(command, env=env, stderr=errors)

    def events(self, slot: int, kind: str) -> list[Event]:
        """The events of a kind that a process has written."""
        path = self.files[slot]
        text = path.read_text() if path.exists() else ""
        events = [json.loads(line) for line in text.split("\n")[:-1]]
        return [event for event in events if event["event"] == kind]

    def until(self, steps: int) -> None:
        """Waits until every process has made so many steps, or has ended."""
        end = time.time() + 300
        while min(len(self.events(s, "step")) for s in self.files) < steps:
            if all(p.poll() is not None for p in self.processes.values()):
                return
            if time.time() > end:
                raise TimeoutError(f"no {steps} steps in {self.files}")
            time.sleep(0.02)

    def ended(self) -> list[int]:
        """The exit statuses, when all have ended."""
        return [p.wait(300) for p in self.processes.values()]

    def split(self, since: float) -> Event:
        """Seconds from ``since`` to the first step, by what they went into."""
        made, restored, step = (
            max(self.events(s, kind)[0]["at"] for s in self.files)
            for kind in ("made", "restored", "step")
        )
        return {
            "seconds": step - since,
            "detection": self.began - since,
            "start": made - self.began,
            "restore": restored - made,
            "first step": step - restored,
        }


def killed(
    config: Config, folder: Path, rng: random.Random
) -> tuple[list[Event], float]:
    """The run with kills: what each cost, and the loss in the end."""
    slots, found = list(range(config.processes)), []
    job = Job(slots, config, folder)
    for _ in range(config.kills):
        job.until(rng.randint(1, 8))
        time.sleep(rng.uniform(0.0, 0.3))
        slot = rng.choice(slots)
        job.processes[slot].kill()
        since = time.time()
        statuses = job.ended()
        rest = [s for s in slots if s != slot]
        done = max(job.events(s, "step")[-1]["step"] for s in rest)
        shutil.rmtree(folder / str(slot))
        fewer = Job(rest, config, folder)
        fewer.until(rng.randint(2, 6))
        found.append(
            {
                "process": slots.index(slot),
                "step": done,
                "statuses": statuses,
                "steps lost": done - fewer.events(rest[0], "restored")[0]["step"],
                **fewer.split(since),
            }
        )
        since = time.time()
        fewer.processes[rest[0]].send_signal(signal.SIGTERM)
        fewer.ended()
        done = fewer.events(rest[0], "step")[-1]["step"]
        job = Job(slots, config, folder)
        job.until(1)
        back = job.events(slot, "restored")[0]
        assert back["new"] == [slots.index(slot)], back
        found[-1]["joining"] = job.split(since)["seconds"]
        found[-1]["steps lost in joining"] = done - back["step"]
        print(json.dumps(found[-1]), flush=True)
    assert job.ended() == [0] * config.processes
    return found, job.events(slots[0], "ended")[0]["loss"]


def simulated(config: Config, seed: int, kills: list[int]) -> float:
    """The loss in the end if at those steps a worker's momentum becomes another's."""
    n, rng = config.processes, random.Random(seed)
    one, step = start(config.steps, seed)
    state = slamb_jax.simulated_replicas(one, n)
    run = slamb_jax.simulated_step(step, n, EXCHANGE)

    def lose(path: Any, x: jax.Array) -> jax.Array:
        if "mu" not in (getattr(key, "name", None) for key in path):
            return x
        return x.at[slot].set(x[(slot + 1) % n])

    for t in range(1, config.steps + 1):
        state, _ = run(state, batch(t, seed, 0, n))
        if t in kills:
            slot = rng.randrange(n)
            state = jax.tree_util.tree_map_with_path(lose, state)
    return evaluate(state)


def main(config: Config) -> None:
    rng, console = random.Random(config.seed), Console(width=110)
    with tempfile.TemporaryDirectory(dir=config.memory) as name:
        found, loss = killed(config, Path(name), rng)
    with tempfile.TemporaryDirectory(dir=config.memory) as name:
        job = Job(list(range(config.processes)), config, Path(name))
        assert job.ended() == [0] * config.processes
        straight = job.events(0, "ended")[0]["loss"]
    steps = [event["step"] for event in found]
    runs = [
        {"kept": simulated(config, seed, []), "lost": simulated(config, seed, steps)}
        for seed in range(config.seeds)
    ]
    machine = hardware(jax.devices()[0])
    about = {"loss": loss, "loss without kills": straight, "simulated": runs}
    lines = [*found, about | {"machine": machine}]
    config.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {
            "measure": name,
            "median": f"{statistics.median(x[name] for x in found):.2f}",
            "largest": f"{max(x[name] for x in found):.2f}",
        }
        for name in found[0]
        if name not in ("process", "step", "statuses")
    ]
    console.print(table(f"{len(found)} kills", rows, machine))
    console.print(f"Loss in the end {loss:.4f}, without kills {straight:.4f}.")
    for run in runs:
        console.print(f"Momenta kept and lost, simulated: {run}")


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
