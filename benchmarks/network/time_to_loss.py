"""Seconds until the loss that dense training reaches, on slow links.

Run from the root of the repository, as root: ``python -m
benchmarks.network.time_to_loss``. No link changes the loss after a number of steps. So
every method is trained once, on simulated workers; the seconds of its steps are
measured on each link, between jax processes in network namespaces; and their product is
the time. On one link some methods are trained to the end as well, which shows how far
the product is off.

Each run is a line of the results; one that is there is not made again, and ``--out
DIR`` makes them all anew, in two hours. Then the page is written, which
``--report`` does alone.
"""

import dataclasses
import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import tyro
from rich.console import Console

from benchmarks.network import losses, timings
from benchmarks.network.losses import Results, Setting, Trial, best_rate
from benchmarks.network.time_page import write_page
from benchmarks.network.timings import FREE, TIMED, Link, Wanted
from benchmarks.train.run import record, use_devices

RESULTS = Path("benchmarks", "network", "time_to_loss.jsonl")


@dataclasses.dataclass(frozen=True)
class Config:
    """The job and the links."""

    task: str = "byte_lm_427k"
    workers: int = 4
    batch: int = 4  # sequences of each worker, per step
    steps: int = 300  # of the dense run
    rates: tuple[float, ...] = (50, 200, 1000)  # Mbit/s of every link, each way
    round_trips: tuple[float, ...] = (1, 20, 80)  # ms
    out: Path = RESULTS.parent
    """where time_to_loss.jsonl is, or will be: elsewhere all is run anew"""
    report: bool = False  # run nothing: the page only

    @property
    def setting(self) -> Setting:
        return Setting(self.task, self.workers, self.batch, self.steps)

    @property
    def links(self) -> list[Link]:
        return [Link(x, delay) for x in self.rates for delay in self.round_trips]

    @property
    def checked(self) -> Link:
        """The link on which methods are trained to the end: the middle one."""
        return self.links[len(self.links) // 2]


def wanted(config: Config, results: Results) -> Iterator[Wanted]:
    """What is missing of the processes: steps on links, and trainings."""
    setting = config.setting
    for link in [FREE, *config.links]:
        for method in TIMED:
            key = timings.key("steps", setting, method, link)
            if results.get(key) is None:
                yield key, timings.ask_steps(setting, method), link
    for method in losses.TO_THE_END:
        key = timings.key("training", setting, method, config.checked)
        rate = best_rate(Trial(setting, method), results)
        if results.get(key) is None and rate is not None:
            yield key, timings.ask_training(setting, method, rate), config.checked


def check(config: Config) -> None:
    """Ends the program for settings that cannot run here."""
    if not 2 <= config.workers <= 200:  # addresses of one network
        raise SystemExit(f"--workers must be from 2 to 200: {config.workers}")
    if not config.rates or min(config.rates) < 1:
        raise SystemExit(f"--rates must be 1 Mbit/s or more: {config.rates}")


def main(config: Config) -> None:
    check(config)
    console = Console()
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as an interrupt does
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    jax.config.update("jax_platforms", "cpu")
    results = Results(config.out / RESULTS.name)
    if not config.report:
        use_devices(config.setting.workers)
        for run in losses.absent(config.setting, results):  # of simulated workers
            record(run, results, console)
        missing = functools.partial(wanted, config, results)
        timings.on_links(config.workers, missing, results, console)
    path = write_page(config.setting, config.links, config.checked, results)
    console.print(f"Wrote {path}", highlight=False)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
