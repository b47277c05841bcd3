"""Does the gap to dense training grow with the model, or with the steps?"""

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from rich.table import Table
from scipy import stats

from benchmarks.frontier.grid import LONGER, SCALE, SEEDS, Setting
from benchmarks.frontier.report import half_interval
from benchmarks.frontier.results import Result, Results, last_loss
from benchmarks.frontier.sweep import finished
from benchmarks.frontier.tasks import task
from examples.common.tables import table

ADAMW = "AdamW", "AdamW, b1 0.8"  # of several names the best at each size counts
COMPARED = {  # a name, its methods, and the dense ones that they are compared with
    "adamw, 1/19": (("adamw, H 1", "adamw, b1 0.8, H 1"), ADAMW),
    "adamw, 1/45": (("adamw, largest of 7",), ADAMW),
    "adamw, 1/180": (("adamw, outer, H 10, outer 1 0.5",), ADAMW),
    "muon, 1/18": (("muon, H 1",), ("Muon",)),
}


class Gap(NamedTuple):
    """Differences of the logarithms of two losses in a setting, seed by seed."""

    setting: Setting
    pairs: list[float]

    @property
    def parameters(self) -> int:
        return parameters(self.setting.task)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.pairs)

    @property
    def above(self) -> float:
        """Of the mean, in %."""
        return 100 * math.expm1(self.mean)

    @property
    def half_interval(self) -> float:
        return half_interval(self.pairs)


class Line(NamedTuple):
    """gap = at_million + slope log10(parameters / 1e6), least squares of all pairs."""

    at_million: float
    slope: float
    half_interval: float  # of the slope, 95 %


@functools.cache
def parameters(name: str) -> int:
    shapes = jax.eval_shape(task(name).init, jax.random.key(0))
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def best(
    setting: Setting, methods: tuple[str, ...], results: Results
) -> list[Result] | None:
    """The runs of the best of the methods that are done there; None if none is."""
    found = [finished(setting, method, results) for method in methods]
    found = [runs for runs in found if len(runs) == len(SEEDS)]
    if not found:
        return None
    return min(found, key=lambda runs: statistics.fmean(map(last_loss, runs)))


def gaps(name: str, results: Results, settings: Sequence[Setting] = SCALE) -> list[Gap]:
    """In each setting where a method of both sides is done, and converged."""
    found = []
    for setting in settings:
        ours, dense = (best(setting, x, results) for x in COMPARED[name])
        if ours is None or dense is None:
            continue
        pairs = [
            math.log(last_loss(x) / last_loss(y))
            for x, y in zip(ours, dense, strict=True)
        ]
        if all(map(math.isfinite, pairs)):
            found.append(Gap(setting, pairs))
    return found


def line(found: list[Gap]) -> Line | None:
    """The line through the gaps; None for fewer than three sizes."""
    if len(found) < 3:
        return None
    points = [(math.log10(x.parameters / 1e6), y) for x in found for y in x.pairs]
    fit: Any = stats.linregress(*zip(*points, strict=True))
    t = float(stats.t.ppf(0.975, len(points) - 2))
    return Line(fit.intercept, fit.slope, t * fit.stderr)


def scale_table(results: Results) -> Table | None:
    """Each method's gap at each size, and how much it grows with the size."""
    rows = []
    every = {name: gaps(name, results) for name in COMPARED}
    sizes = sorted({gap.parameters for found in every.values() for gap in found})
    for name, found in every.items():
        at = {gap.parameters: gap for gap in found}
        row = {"method": name}
        for size in sizes:
            row[f"{size:,}"] = percent(at[size]) if size in at else "-"
        fit = line(found)
        row["for ten times the size"] = (
            f"{100 * fit.slope:+.1f} ± {100 * fit.half_interval:.1f}" if fit else "-"
        )
        rows.append(row)
    if not sizes:
        return None
    return table(
        "Loss above the dense optimizer's, %, by parameters, and the slope of a line",
        rows,
        "20 bytes of text for each parameter; every rate is chosen at every size; the "
        "better of b1 0.9 and 0.8, of those that were run, counts for AdamW, dense and "
        "at 1/19, and 0.9 for the others; paired over seeds, ± is half an interval of "
        "95 %",
    )


def length_table(results: Results) -> Table | None:
    """The gaps of the smallest model in more and more steps."""
    found = gaps("adamw, 1/19", results, (SCALE[0], *LONGER))
    if len(found) < 2:
        return None
    row = {f"{gap.setting.steps:,} steps": percent(gap) for gap in found}
    return table(
        f"{found[0].parameters:,} parameters in more steps: loss above, %",
        [{"method": "adamw, 1/19", **row}],
        "As above",
    )


def percent(gap: Gap) -> str:
    return f"{gap.above:+.1f} ± {100 * gap.half_interval:.1f}"
