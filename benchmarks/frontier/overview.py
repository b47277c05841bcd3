"""Every method in every setting at a glance: how far above dense LAMB's loss."""

from collections.abc import Iterable

from rich.table import Table

from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import DENSE, METHODS
from benchmarks.frontier.report import mean_loss, total_bytes
from benchmarks.frontier.results import Results
from benchmarks.frontier.sweep import finished


def overview(settings: Iterable[Setting], results: Results) -> Table | None:
    """A row for each method; None where no two settings have LAMB beside another."""
    found = {
        setting: {name: finished(setting, name, results) for name in METHODS}
        for setting in settings
    }
    shown = {
        setting: runs
        for setting, runs in found.items()
        if runs[DENSE] and sum(map(bool, runs.values())) > 1
    }
    if len(shown) < 2:
        return None
    out = Table(
        title="Loss above LAMB's, %, and the range of the shares of its bytes",
        caption="A setting is task-workers x batch-steps; means over seeds",
    )
    out.add_column("method")
    out.add_column("share", justify="right")
    for setting in shown:
        out.add_column(str(setting), justify="right")
    for name in METHODS:
        if any(runs[name] for runs in shown.values()):
            cells = [_above(runs, name) for runs in shown.values()]
            out.add_row(name, _shares(shown, name), *cells)
    return out


def _above(runs: dict[str, list], name: str) -> str:
    if not runs[name]:
        return ""
    loss = mean_loss(runs[name])
    if loss == float("inf"):
        return "diverged"
    return f"{100 * (loss / mean_loss(runs[DENSE]) - 1):+.1f}"


def _shares(shown: dict[Setting, dict[str, list]], name: str) -> str:
    shares = [
        total_bytes(runs[name]) / total_bytes(runs[DENSE])
        for runs in shown.values()
        if runs[name] and mean_loss(runs[name]) < float("inf")  # else it stopped early
    ]
    if not shares:
        return ""
    low, high = f"{min(shares):.3f}", f"{max(shares):.3f}"
    return low if low == high else f"{low} to {high}"
