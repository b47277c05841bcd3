"""Recorded runs made again: which, how long they take, and both losses side by side."""

import statistics
from collections.abc import Iterable, Iterator

from rich.table import Table

from benchmarks.frontier.grid import SEEDS, TESTED_ON, Setting
from benchmarks.frontier.report import Cell
from benchmarks.frontier.results import Result, Results, last_loss
from benchmarks.frontier.run import Run
from benchmarks.frontier.sweep import best_rate, finished
from examples.common.tables import spread, table

ALL_SEEDS = tuple(dict.fromkeys(SEEDS + TESTED_ON))
Pairs = list[tuple[Setting, str]]


def runs_again(pairs: Pairs, seeds: int, recorded: Results) -> list[Run]:
    """Of each pair with a recorded rate the first seeds at that rate."""
    return [
        Run(setting, method, rate, seed)
        for setting, method in pairs
        if (rate := best_rate(setting, method, recorded)) is not None
        for seed in range(seeds)
    ]


def of_pair(setting: Setting, method: str, results: Results) -> Iterator[Result]:
    """All of its results, at every rate."""
    for result in results:
        rate, seed = result["key"]["rate"], result["key"]["seed"]
        if results.get(Run(setting, method, rate, seed).key()) is result:
            yield result


def seconds(setting: Setting, method: str, recorded: Results) -> float:
    """Of a run, the median of the recorded ones; 0 if there are none."""
    found = [run["run_seconds"] for run in of_pair(setting, method, recorded)]
    return statistics.median(found) if found else 0.0


def minutes(runs: Iterable[Run], recorded: Results) -> float:
    """Of all these runs, by the recorded ones."""
    return sum(seconds(run.setting, run.method, recorded) for run in runs) / 60


def minutes_of_sweeps(pairs: Pairs, recorded: Results) -> float:
    """Of all runs that the pairs took, their sweeps included."""
    return sum(
        seconds(*pair, recorded) * sum(1 for _ in of_pair(*pair, recorded)) / 60
        for pair in pairs
    )


def compared(pairs: Pairs, results: Results, recorded: Results) -> Table | None:
    """The losses of each pair that was run again, beside those of the same seeds."""
    rows, first = [], dict[Setting, tuple[float, float]]()
    for setting, method in pairs:
        both = {
            run["key"]["seed"]: (last_loss(run), last_loss(again))
            for run in finished(setting, method, recorded, ALL_SEEDS)
            if (again := results.get(run["key"])) is not None
        }
        if not both:
            continue
        old, new = (list(x) for x in zip(*both.values(), strict=True))
        means = statistics.fmean(old), statistics.fmean(new)
        every = finished(setting, method, recorded, ALL_SEEDS)
        above = first.setdefault(setting, means)
        cell = Cell([results.get(every[0]["key"]) or every[0]], setting.workers, 0)
        rows.append(
            {
                "method": f"{setting} {method}",
                "seeds": ", ".join(map(str, both)),
                "loss": spread(new),
                "recorded": spread(old),
                "off, %": f"{100 * (means[1] / means[0] - 1):+.2f}",
                "all recorded": spread([last_loss(x) for x in every]),
                "above the first, %": f"{100 * (means[1] / above[1] - 1):+.1f}",
                "recorded so": f"{100 * (means[0] / above[0] - 1):+.1f}",
                "MiB sent": f"{cell.bytes / 2**20:.2f}",
            }
        )
    if not rows:
        return None
    caption = "recorded: of the same seeds; the first: of its setting, in this table"
    return table(f"Beside {recorded.path}", rows, caption)
