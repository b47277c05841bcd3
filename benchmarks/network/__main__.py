"""Steps on hosts joined by slow links: SLAMB beside dense LAMB, and the advisor.

Run from the root of the repository, as root: ``python -m benchmarks.network``. Each
host is a jax process in a network namespace of its own, joined by a bridge, and every
link is shaped. Beside the seconds of a step stand the bytes that the kernel counted,
those of the compiled program, and what ``slamb_jax.advise`` says.
"""

import dataclasses
import functools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import optax
import tyro
from rich.console import Console

from benchmarks.network import model, timings
from benchmarks.network.losses import Results, Setting
from benchmarks.network.timings import Link, Wanted
from benchmarks.rivals import elements
from benchmarks.train.tasks import task
from examples.common.processes import local_mesh
from examples.common.tables import table
from examples.common.traffic import report_of
from examples.hardware import hardware

ADVISED = dict(  # the optimizers, and their names in an Advice
    zip(model.METHODS, ("dense", "dense_bfloat16", "exchanging", "exchanging"),
        strict=True)
)  # fmt: skip
CAPTION = (
    "alone: the same step with nothing sent, on all hosts at once; advised: "
    "slamb_jax.advise, and by how much it is off; kB sent: by each worker per step, by "
    "the interface counters without headers; counters /, advised /: over the wire "
    "report; headers: and acknowledgements, of all bytes sent"
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The links."""

    rates: tuple[float, ...] = (50, 200, 1000)  # Mbit/s of every link, each way
    task: str = "byte_lm_1600k"
    workers: int = 4
    out: Path = Path("runs/network")

    @property
    def setting(self) -> Setting:
        return Setting(self.task, self.workers, 1, 0)

    def wanted(self, results: Results) -> Iterator[Wanted]:
        """The steps that are missing: alone and on links."""
        for link in [None, *(Link(rate, 0.0) for rate in self.rates)]:
            for method in ADVISED:
                key = timings.key("steps", self.setting, method, link)
                if results.get(key) is None:
                    yield key, timings.ask_steps(self.setting, method, link), link


def check(config: Config) -> None:
    """Ends the program for settings that cannot run here."""
    if not 2 <= config.workers <= 200:  # addresses of one network
        raise SystemExit(f"--workers must be from 2 to 200: {config.workers}")
    if not config.rates or min(config.rates) < 1:
        raise SystemExit(f"--rates must be 1 Mbit/s or more: {config.rates}")


@functools.cache
def wire_bytes(name: str, setting: Setting) -> float:
    """Bytes of a step by the wire report, averages of the parameters included."""
    method, mesh = model.METHODS[name], local_mesh(setting.workers)
    params = jax.eval_shape(task(setting.task).init, jax.random.key(0))
    tx = method.make(optax.constant_schedule(0.1), method.exchange)
    report = report_of(tx, method.exchange, params, mesh)
    average = report.bytes_sent(conditional=True)
    return report.bytes_sent() + average / (method.exchange.sync_every or 1)


def cells(setting: Setting, name: str, mbit: float, results: Results) -> dict[str, str]:
    """The row of an optimizer at one speed of the links: measured and advised."""
    link = Link(float(mbit), 0.0)
    here, alone = (timings.pace(setting, name, x, results) for x in (link, None))
    found = results.get(timings.key("steps", setting, name, link))
    assert here is not None
    assert alone is not None
    assert found is not None
    cost = getattr(timings.advice(setting, name, link, results, name), ADVISED[name])
    sent, wire = here.sent / here.every, wire_bytes(name, setting)
    return {
        "Mbit/s": f"{mbit:g}",
        "optimizer": name,
        "ms a step": f"{here.step * 1e3:.0f}",
        "alone": f"{alone.step * 1e3:.0f}",
        "advised": f"{cost.step_seconds * 1e3:.0f}",
        "off": f"{cost.step_seconds / here.step - 1:+.1%}",
        "kB sent": f"{sent / 1e3:.0f}",
        "wire report": f"{wire / 1e3:.0f}",
        "counters /": f"{sent / wire:.3f}",
        "advised /": f"{cost.bytes_per_step / wire:.3f}",
        "headers": f"{found['header_share']:.1%}",
    }


def main(config: Config) -> None:
    check(config)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as an interrupt does
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    jax.config.update("jax_platforms", "cpu")
    local_mesh(config.workers)  # to read bytes off programs
    console, results = Console(width=130), Results(config.out / "steps.jsonl")
    wanted = functools.partial(config.wanted, results)
    try:
        timings.on_links(config.workers, wanted, results, console, delays=False)
    except RuntimeError as error:
        raise SystemExit(f"The run ended early: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("Interrupted; hosts and workers are removed.") from None
    setting, machine = config.setting, hardware(jax.devices()[0])
    rows = [cells(setting, x, mbit, results) for mbit in config.rates for x in ADVISED]
    d = elements(jax.eval_shape(task(setting.task).init, jax.random.key(0)))
    size = f"{config.workers} hosts, {d / 1e6:.2f} M parameters, k 0.1, H 10"
    console.print(table(size, rows, f"{CAPTION}. {machine}"))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
