"""Tables with spreads, from the results as far as there are any."""

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Any

from rich.table import Table

import slamb_jax
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import DENSE, METHODS
from benchmarks.frontier.results import Result, Results, last_loss
from benchmarks.frontier.run import timing_key
from benchmarks.frontier.sweep import finished
from benchmarks.frontier.tasks import task
from benchmarks.rivals import wire_bytes
from examples.common.tables import spread, table

LINKS = {"100 Mbit": 1e8, "1 Gbit": 1e9, "10 Gbit": 1e10, "100 Gbit": 1e11}
OURS = ("SLAMB", "adamw,", "muon,")  # whose exchange is of this library
COMPARED = 1 / 1000, 1 / 4  # of dense LAMB's bytes: where rivals are compared
Point = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method in a setting: its runs, one for each seed."""

    runs: list[Result]
    workers: int
    step_seconds: float  # of a simulated step, all workers

    @property
    def losses(self) -> list[float]:
        return [last_loss(run) for run in self.runs]

    @property
    def loss(self) -> float:
        """The last evaluation loss, over seeds."""
        return statistics.fmean(self.losses)

    @property
    def bytes(self) -> float:
        """Bytes that each worker sends in a run; as many with every seed."""
        return self.bytes_by(self.runs[0]["points"][-1])

    def bytes_by(self, point: Point) -> float:
        return sum(
            often * wire_bytes([(kind, payload)], self.workers)
            for kind, payload, often in point["exchanges"]
        )

    def seconds_by(self, point: Point, link: float) -> float:
        """Wall time: a worker's share of the simulated step, then the exchange."""
        network = slamb_jax.Network(self.workers, link)
        return point["step"] * self.step_seconds / self.workers + sum(
            often * network.seconds(kind, payload)
            for kind, payload, often in point["exchanges"]
        )


Cells = dict[str, Cell]


def cells(setting: Setting, results: Results) -> Cells:
    """Of the methods that have finished runs in this setting."""
    found = {name: finished(setting, name, results) for name in METHODS}
    return {
        name: Cell(runs, setting.workers, step_seconds(setting, name, runs, results))
        for name, runs in found.items()
        if runs
    }


def step_seconds(
    setting: Setting, method: str, runs: list[Result], results: Results
) -> float:
    """Of a simulated step: as timed in turn with LAMB's, else as in the runs.

    The speed of a machine varies from day to day, so it is LAMB's time, multiplied by
    the ratio that was measured in one process.
    """
    timed, dense = (results.get(timing_key(setting, name)) for name in (method, DENSE))
    if timed is None:
        return statistics.median(run["step_seconds"] for run in runs)
    took: float = timed["step_seconds"]
    if dense is None or "dense_seconds" not in timed:
        return took
    return took / timed["dense_seconds"] * dense["step_seconds"]


def above(cell: Cell, dense: Cell) -> str:
    """By how many per cent a loss ends above dense LAMB's."""
    if cell.loss == float("inf"):
        return "diverged"
    return f"{100 * (cell.loss / dense.loss - 1):+.1f}"


def setting_table(setting: Setting, found: Cells) -> Table:
    """Losses, bytes and seconds of every method."""
    machines = sorted({run["hardware"] for cell in found.values() for run in cell.runs})
    rows, dense = [], found.get(DENSE)
    for name, cell in found.items():
        last = cell.runs[0]["points"][-1]
        row = {
            "method": name,
            "rate": f"{cell.runs[0]['key']['rate']:g}",
            "seeds": str(len(cell.runs)),
            "loss": spread(cell.losses),
            "above LAMB, %": above(cell, dense) if dense else "",
            "MiB sent": f"{cell.bytes / 2**20:.2f}",
            "share": f"{cell.bytes / dense.bytes:.4f}" if dense else "",
        }
        for link, rate in LINKS.items():
            row[link] = f"{cell.seconds_by(last, rate):.3g}"
        rows.append(row)
    title = (
        f"{setting.task}, {setting.workers} workers x {setting.batch}, "
        f"{setting.steps} steps; loss in {task(setting.task).unit}"
    )
    caption = (
        f"{'; '.join(machines)}; ± is the deviation over seeds; seconds at each link, "
        "by slamb_jax.Network"
    )
    return table(title, rows, caption)


def rivals_table(setting: Setting, found: Cells) -> Table | None:
    """Each rival beside the best SLAMB that sends no more, or else sends the fewest."""
    ours = [name for name in found if name.startswith(OURS)]
    if DENSE not in found or not ours:
        return None
    shares = {name: cell.bytes / found[DENSE].bytes for name, cell in found.items()}
    out = Table(
        title=f"{setting}: each rival, and SLAMB at no more bytes or else its fewest"
    )
    for words, *numbers in (
        ("rival", "share", "loss"),
        ("SLAMB", "share", "loss", "behind by, %"),
    ):
        out.add_column(words)
        for head in numbers:
            out.add_column(head, justify="right")
    for name in sorted(shares, key=shares.__getitem__, reverse=True):
        if name in ours or not COMPARED[0] <= shares[name] <= COMPARED[1]:
            continue
        most = max(shares[name], min(shares[other] for other in ours))
        able = [other for other in ours if shares[other] <= most]
        best = min(able, key=lambda other: found[other].loss)
        cells = [
            cell
            for x in (name, best)
            for cell in (x, f"{shares[x]:.4f}", spread(found[x].losses))
        ]
        out.add_row(*cells, above(found[best], found[name]))
    return out if out.row_count else None


def overview(settings: Iterable[Setting], results: Results) -> Table | None:
    """Each method in each setting; None unless two settings have LAMB and another."""
    every = {setting: cells(setting, results) for setting in settings}
    shown = {
        s: found for s, found in every.items() if DENSE in found and len(found) > 1
    }
    if len(shown) < 2:
        return None
    rows = []
    for name in METHODS:
        here = [found for found in shown.values() if name in found]
        shares = [  # a run that diverged stopped early
            f"{found[name].bytes / found[DENSE].bytes:.3f}"
            for found in here
            if found[name].loss < float("inf")
        ]
        share = " to ".join(dict.fromkeys((min(shares), max(shares)))) if shares else ""
        losses = {
            str(setting): above(found[name], found[DENSE]) if name in found else ""
            for setting, found in shown.items()
        }
        if here:
            rows.append({"method": name, "share": share, **losses})
    return table(
        "Loss above LAMB's, %, and the range of the shares of its bytes",
        rows,
        "A setting is task-workers x batch-steps; means over seeds",
    )
