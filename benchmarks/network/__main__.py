"""Trains on hosts joined by slow links: SLAMB beside dense LAMB, and the advisor.

Run from the root of the repository, as root: ``python -m benchmarks.network``. Each
host is a jax process in a network namespace of its own, joined by a bridge, and every
link is shaped. All optimizers take turns within one run. Without root, or without
iproute2, ``--loopback`` runs the same processes over the loopback interface, which
nothing slows down.
"""

import contextlib
import dataclasses
import signal
import socket
import sys
from pathlib import Path

import jax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.network import report
from benchmarks.network.model import init
from benchmarks.network.namespaces import missing, network
from benchmarks.network.processes import worker_command, workers
from benchmarks.network.results import Row, rows
from benchmarks.network.worker import DENSE_STEPS, Job
from benchmarks.rivals import elements
from examples.common.simulated import AXIS
from examples.hardware import hardware

PATIENCE = 240  # seconds for a start, or for a round beside the time of its bytes


@dataclasses.dataclass(frozen=True)
class Config:
    """The links and optimizers to measure."""

    rates: tuple[float, ...] = (50, 200, 1000)  # Mbit/s of every link, each way
    rounds: int = 3  # at each rate, of one cycle of SLAMB
    workers: int = 4
    compress_ratio: float = 0.1
    sync_every: int = 10
    seed: int = 0
    loopback: bool = False  # no namespaces, no rates
    out: Path = Path("runs/network")
    report: bool = False  # run nothing: the picture of the results in --out only

    @property
    def exchange(self) -> slamb_jax.Exchange:
        selection = slamb_jax.selections.Strided(self.compress_ratio)
        return slamb_jax.Exchange.paper(
            AXIS, selection=selection, sync_every=self.sync_every
        )


def check(config: Config) -> None:
    """Ends the program for settings that cannot run here."""
    try:
        _ = config.exchange
    except ValueError as error:
        raise SystemExit(f"--{str(error).replace('_', '-')}") from error
    if config.rounds < 1:
        raise SystemExit(f"--rounds must be >= 1: {config.rounds}")
    if not 2 <= config.workers <= 200:  # addresses of one network
        raise SystemExit(f"--workers must be from 2 to 200: {config.workers}")
    if not config.rates or min(config.rates) < 1:
        raise SystemExit(f"--rates must be 1 Mbit/s or more: {config.rates}")
    if not Path("/sys/class/net/lo").exists():
        raise SystemExit("The counters of interfaces are read from Linux's /sys.")
    if not config.loopback and (lacking := missing()):
        raise SystemExit(
            f"Shaped links need Linux, root and iproute2; missing here: {lacking}. "
            "With --loopback the same processes run unshaped."
        )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def measure(config: Config, console: Console) -> list[Row]:
    """All optimizers in turn, at every rate, on hosts that exist as long."""
    found: list[Row] = []
    with contextlib.ExitStack() as stack:
        net, numbers = None, range(config.workers)
        coordinator, interface = f"localhost:{free_port()}", "lo"
        if not config.loopback:
            net = stack.enter_context(network(config.workers))
            coordinator, interface = f"{net.address(0)}:4711", "eth0"
        exchange = config.exchange.to_json()
        job = Job(config.workers, exchange, config.seed, coordinator, interface)
        commands = [worker_command(dataclasses.asdict(job), i) for i in numbers]
        if net is not None:
            commands = [net.command(i) + commands[i] for i in numbers]
        running = stack.enter_context(workers(commands))
        with console.status(f"{config.workers} workers start and compile"):
            wires = running.reports(PATIENCE)[0]
        console.print(f"SLAMB's compiled step:\n{wires['SLAMB']['table']}")
        bits = 0.0
        for name, wire in wires.items():
            cycle = config.sync_every if name.startswith("SLAMB") else DENSE_STEPS
            bits += 8 * (cycle * wire["every_step"] + wire["at_average"])
        for rate in [None] if net is None else config.rates:
            what, timeout, measured = "loopback", float(PATIENCE), []
            if net is not None and rate is not None:
                net.shape(rate)
                what, timeout = f"{rate:g} Mbit/s", PATIENCE + 5 * bits / rate / 1e6
            for i in range(config.rounds):
                with console.status(f"{what}: round {i + 1} of {config.rounds}"):
                    measured.append(running.measure(timeout))
            found += rows(rate, measured, wires, config.exchange)
    return found


def draw(out: Path, console: Console) -> None:
    """The picture alone, of results that are there."""
    if not (out / report.RESULTS).exists():
        raise SystemExit(f"--report: there is no {out / report.RESULTS}")
    report.picture(report.read(out), out / report.PICTURE)
    console.print(f"Wrote {out / report.PICTURE}", highlight=False)


def main(config: Config) -> None:
    if config.report:
        draw(config.out, Console())
        return
    check(config)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as an interrupt does
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    jax.config.update("jax_platforms", "cpu")
    console = Console(width=130)
    try:
        found = measure(config, console)
    except RuntimeError as error:
        raise SystemExit(f"The run ended early: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("Interrupted; hosts and workers are removed.") from None
    d = elements(jax.eval_shape(init, jax.random.key(0)))
    machine = hardware(jax.devices()[0])
    title = (
        f"{config.workers} hosts, {d / 1e6:.2f} M parameters, {config.exchange}, "
        f"{config.rounds} rounds, seed {config.seed}"
    )
    console.print(report.measured_table(found, title, machine))
    conditions = {"config": dataclasses.asdict(config), "machine": machine}
    written = report.write(found, conditions, config.out)
    console.print("Wrote " + ", ".join(map(str, written)))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
