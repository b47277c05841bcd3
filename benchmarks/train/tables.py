"""Tables with spreads and paired tests, from the results as far as there are any."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from scipy import stats

from benchmarks.train.results import Result, Results, last
from benchmarks.train.run import LOOKED_AT
from benchmarks.train.search import best_rate, finished, runs_at, swept
from benchmarks.train.tasks import parameters, task
from benchmarks.train.trials import Comparison, Grid, Setting, Trial
from examples.common.tables import spread, table

MARGIN = 0.01  # a claim: at most so much above a dense method


@dataclasses.dataclass(frozen=True)
class Cell:
    """A method in a setting at a rate: its runs, one for each seed."""

    trial: Trial
    runs: list[Result]
    tuned: int  # runs of the searches that its settings come from

    @property
    def losses(self) -> list[float]:
        return [last(run) for run in self.runs]

    @property
    def loss(self) -> float:
        """The last evaluation loss, over seeds."""
        return statistics.fmean(self.losses)

    @property
    def half_interval(self) -> float:
        """Half the interval of 95 % of the mean; 0 for one run."""
        if len(self.runs) == 1 or self.loss == math.inf:
            return 0.0
        return half_interval(self.losses)

    @property
    def bytes(self) -> float:
        """Bytes that each worker sends in a run; as many with every seed."""
        return last(self.runs[0], "bytes")

    def shown(self, measure: str) -> str:
        """The mean and deviation of what was measured; an agreement after 100 steps."""
        if measure == "agreement":
            found = [
                point["agreement"]
                for run in self.runs
                for point in run["points"]
                if point["step"] == LOOKED_AT and "agreement" in point
            ]
            return spread(found, 2) if found else ""
        digits = {"loss": 3 if measure == self.trial.measures[-1] else 4, "accuracy": 2}
        return spread([last(run, measure) for run in self.runs], digits[measure])


def variant_of(method: str) -> str:
    """The method without the settings of its outer step, the best of which counts."""
    return method.split(", outer ")[0]


def cells(trials: Iterable[Trial], results: Results) -> list[Cell]:
    """Of the trials with finished runs, at each given rate; of variants the best."""
    best: dict[Any, Cell] = {}
    for trial in trials:
        tuned = len(swept(trial, results))
        for rate in trial.rates or [best_rate(trial, results)]:
            keys = [run.key() for run in runs_at(trial, rate or 0.0, trial.seeds)]
            runs = [found for key in keys if (found := results.get(key)) is not None]
            if not runs:
                continue
            cell = Cell(trial, runs, tuned)
            kind = trial.setting, variant_of(trial.method), rate if trial.rates else 0
            if (other := best.get(kind)) is not None:
                better = min(other, cell, key=lambda x: x.loss)
                cell = dataclasses.replace(better, tuned=other.tuned + tuned)
            best[kind] = cell
    return list(best.values())


def of_method(found: Iterable[Cell], method: str) -> Cell | None:
    """Its cell; at several given rates the best."""
    same = [cell for cell in found if cell.trial.method == method]
    return min(same, key=lambda cell: cell.loss, default=None)


def by_setting(grid: Grid, results: Results) -> dict[Setting, list[Cell]]:
    found = cells(grid.trials, results)
    settings = dict.fromkeys(cell.trial.setting for cell in found)
    return {x: [cell for cell in found if cell.trial.setting == x] for x in settings}


def above(cell: Cell, dense: Cell | None) -> str:
    """By how many per cent a loss ends above another's, on the seeds of both."""
    if dense is None:
        return ""
    if cell.loss == math.inf:
        return "diverged"
    seeds = [run["key"]["seed"] for run in cell.runs]
    same = [last(run) for run in dense.runs if run["key"]["seed"] in seeds]
    return f"{100 * (cell.loss / statistics.fmean(same or dense.losses) - 1):+.1f}"


def setting_table(setting: Setting, grid: Grid, found: list[Cell]) -> Table:
    """What was measured of every method, and its bytes."""
    machines = {run.get("hardware", "") for cell in found for run in cell.runs} - {""}
    rows, dense = [], of_method(found, grid.dense)
    for cell in found:
        shares = [times * cell.bytes / dense.bytes for times in (1, 2)] if dense else []
        beside = {f"above {grid.dense}, %": above(cell, dense)}
        if "loss" not in cell.trial.measures:
            beside = {}
        rows.append(
            {
                "method": cell.trial.method,
                "rate": f"{cell.runs[0]['key']['rate']:g}",
                "tuned in": "given" if cell.trial.rates else f"{cell.tuned} runs",
                "seeds": str(len(cell.runs)),
                **{name: cell.shown(name) for name in cell.trial.measures},
                **beside,
                "MiB sent": f"{cell.bytes / 2**20:.2f}",
                "share": f"{shares[0]:.4f}" if dense else "",
                "of bfloat16": f"{shares[1]:.4f}" if dense else "",
            }
        )
    title = (
        f"{setting.task}, {setting.workers} workers x {setting.batch}, "
        f"{setting.steps} steps; loss in {task(setting.task).unit}"
    )
    caption = (
        "± is the deviation over seeds; of all outer steps the best is shown; share: "
        f"of the bytes of {grid.dense} in float32"
    )
    return table(title, rows, "; ".join([*sorted(machines), caption]))


class Paired(NamedTuple):
    """Differences of the logarithms of two losses, seed by seed."""

    setting: Setting
    pairs: list[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.pairs)

    @property
    def half(self) -> float:
        """Half the interval of 95 %."""
        return half_interval(self.pairs)

    @property
    def p(self) -> float:
        """Of a mean this low, if the true one were the margin."""
        margin = math.log1p(MARGIN)
        test: Any = stats.ttest_1samp(self.pairs, margin, alternative="less")
        return float(test.pvalue)


def half_interval(values: list[float]) -> float:
    """Half the interval of 95 % of the mean of two or more, by Student's t."""
    n = len(values)
    t = float(stats.t.ppf(0.975, n - 1))
    return t * statistics.stdev(values) / math.sqrt(n)


def paired(setting: Setting, ours: list[float], dense: list[float]) -> Paired:
    found = zip(ours, dense, strict=True)
    return Paired(setting, [math.log(x / y) for x, y in found])


def losses_of(
    names: Sequence[str], what: Comparison, setting: Setting, results: Results
) -> list[float]:
    """Of the best of the methods whose seeds are all there; none if none is done."""
    found = [finished(Trial(setting, name), results, what.seeds) for name in names]
    losses = [list(map(last, x)) for x in found if len(x) == len(what.seeds)]
    return min(losses, key=statistics.fmean, default=[])


def differences(what: Comparison, results: Results) -> list[Paired]:
    """In each setting where a method of both sides is done, and converged."""
    found = []
    for setting in what.settings:
        ours, dense = (
            losses_of(names, what, setting, results)
            for names in (what.ours, what.dense)
        )
        if ours and dense and all(map(math.isfinite, ours + dense)):
            found.append(paired(setting, ours, dense))
    return found


def slope(found: list[Paired]) -> tuple[float, float] | None:
    """By ten times the parameters, least squares; and half its interval of 95 %.

    None for fewer than three sizes.
    """
    points = [
        (math.log10(parameters(x.setting.task)), y) for x in found for y in x.pairs
    ]
    if len({x for x, _ in points}) < 3:
        return None
    fit: Any = stats.linregress(*zip(*points, strict=True))
    return fit.slope, float(stats.t.ppf(0.975, len(points) - 2)) * fit.stderr


def comparisons_table(grid: Grid, results: Results) -> Table | None:
    """Each comparison of a grid in each setting, and the slope over sizes."""
    rows = []
    for what in grid.comparisons:
        found = differences(what, results)
        for x in found:
            ends = (math.expm1(x.mean - x.half), math.expm1(x.mean + x.half))
            rows.append(
                {
                    "comparison": what.name,
                    "setting": str(x.setting),
                    "parameters": f"{parameters(x.setting.task):,}",
                    "seeds": f"{what.seeds[0]} to {what.seeds[-1]}",
                    "difference, %": f"{100 * math.expm1(x.mean):+.1f}",
                    "±": f"{100 * x.half:.1f}",
                    "95 % interval": " to ".join(f"{100 * y:+.2f}" for y in ends),
                    f"p ({100 * MARGIN:g} % or more)": f"{x.p:.2g}",
                }
            )
        if fit := slope(found):
            rows.append(
                dict.fromkeys(rows[-1], "")
                | {
                    "comparison": what.name,
                    "setting": "for ten times the size",
                    "difference, %": f"{100 * fit[0]:+.1f}",
                    "±": f"{100 * fit[1]:.1f}",
                }
            )
    if not rows:
        return None
    caption = "Paired over seeds; of several methods on a side the best counts"
    return table(f"{grid.title}: beside dense training", rows, caption)


def runs_of(trial: Trial, results: Results) -> list[Result]:
    """All of its results, at every rate."""
    own = dataclasses.asdict(trial.setting) | {"method": trial.method}
    return [run for run in results if run["key"].items() >= own.items()]


def beside_recorded(
    trials: Iterable[Trial], results: Results, recorded: Results
) -> Table | None:
    """The losses of each trial that was run again, beside those of the same seeds."""
    rows, first = [], dict[Setting, tuple[float, float]]()
    for trial in trials:
        rate, measure = best_rate(trial, recorded), trial.measures[0]
        every = [
            x
            for x in runs_of(trial, recorded)
            if x["key"]["rate"] == rate and measure in x["points"][-1]
        ]
        pairs = [(x, results.get(x["key"])) for x in every]
        runs = [(x, again) for x, again in pairs if again is not None]
        if not runs:
            continue
        old, new = (
            [last(x, measure) for x in side] for side in zip(*runs, strict=True)
        )
        means = statistics.fmean(old), statistics.fmean(new)
        before = first.setdefault(trial.setting, means)
        rows.append(
            {
                "method": str(trial),
                "seeds": ", ".join(str(x["key"]["seed"]) for x, _ in runs),
                measure: spread(new),
                "recorded": spread(old),
                "off, %": f"{100 * (means[1] / means[0] - 1):+.2f}",
                "all recorded": spread([last(x, measure) for x in every]),
                "above the first, %": f"{100 * (means[1] / before[1] - 1):+.1f}",
                "recorded so": f"{100 * (means[0] / before[0] - 1):+.1f}",
                "MiB sent": f"{last(runs[0][1], 'bytes') / 2**20:.2f}",
            }
        )
    if not rows:
        return None
    caption = "recorded: of the same seeds; the first: of its setting, in this table"
    return table(f"Beside {recorded.path}", rows, caption)
