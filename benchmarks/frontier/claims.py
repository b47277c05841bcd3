"""A paired test of each claim, over seeds that no rate was chosen on."""

import math
from typing import Any, NamedTuple

from rich.table import Table
from scipy import stats

from benchmarks.frontier.grid import CLAIMED, MARGIN, TESTED_ON, Setting
from benchmarks.frontier.results import Results, last_loss
from benchmarks.frontier.sweep import finished
from examples.common.tables import spread, table


class Paired(NamedTuple):
    """Differences of the logarithms of two losses, seed by seed."""

    seeds: int
    mean: float
    low: float  # ends of the interval of 95 %
    high: float
    p: float  # of a mean this low, if the true one were the margin


def paired(ours: list[float], dense: list[float], margin: float = MARGIN) -> Paired:
    """Student's t on the pairs: is the mean difference below the margin?"""
    found = [math.log(x / y) for x, y in zip(ours, dense, strict=True)]
    test: Any = stats.ttest_1samp(found, math.log1p(margin), alternative="less")
    low, high = stats.ttest_1samp(found, 0.0).confidence_interval(0.95)
    mean = math.fsum(found) / len(found)
    return Paired(len(found), mean, low, high, test.pvalue)


def losses_on_seeds(setting: Setting, method: str, results: Results) -> list[float]:
    """The losses of a method on the seeds of the tests, if all are there."""
    runs = finished(setting, method, results, TESTED_ON)
    return [last_loss(run) for run in runs] if len(runs) == len(TESTED_ON) else []


def claims_table(setting: Setting, results: Results) -> Table | None:
    """Each claim of a setting whose runs are all there."""
    rows = []
    for method, dense in CLAIMED.get(setting, {}).items():
        ours, other = (losses_on_seeds(setting, x, results) for x in (method, dense))
        if not (ours and other):
            continue
        test = paired(ours, other)
        row = {
            "claim": f"{method} beside {dense}",
            "seeds": str(test.seeds),
            "loss": spread(ours),
            "dense": spread(other),
            "difference, %": f"{100 * math.expm1(test.mean):+.2f}",
            "95 % interval": " to ".join(
                f"{100 * math.expm1(x):+.2f}" for x in (test.low, test.high)
            ),
            f"p ({100 * MARGIN:g} % or more)": f"{test.p:.2g}",
        }
        rows.append(row)
    if not rows:
        return None
    title = f"{setting}: paired over seeds {TESTED_ON[0]} to {TESTED_ON[-1]}"
    return table(title, rows, "Neither rate was chosen on these seeds")
