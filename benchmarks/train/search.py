"""One search of rates for every method, and the runs that follow from it.

1. A rate is run at the middle of the method's and by the root of two on either side.
2. While the best of them stands at an end, the next rate there is run.
3. At the best rate, every seed is run.
"""

import itertools
from collections.abc import Iterable, Iterator

from benchmarks.train.grids import METHODS
from benchmarks.train.results import Result, Results, last
from benchmarks.train.trials import Run, Trial, rate_of

POWERS = (-1, 0, 1)  # of the root of two, times the middle of the method's rates
FURTHER = 6  # more on a side, while the best stands at that end


def runs_at(trial: Trial, rate: float, seeds: Iterable[int]) -> list[Run]:
    return [Run(trial.setting, trial.method, rate, seed) for seed in seeds]


def searched(trial: Trial, results: Results) -> Iterator[Run]:
    """The runs of the search that are still missing."""
    powers = list(POWERS)
    while True:
        runs = {power: _at_power(trial, power) for power in powers}
        yield from absent(itertools.chain(*runs.values()), results)
        # Where all diverged the lowest counts as the best, and lower ones follow.
        best = min(powers, key=lambda p: (_loss(runs[p], results), p))
        if best == max(powers) < max(POWERS) + FURTHER:
            powers.append(best + 1)
        elif best == min(powers) > min(POWERS) - FURTHER:
            powers.append(best - 1)
        else:
            return


def best_rate(trial: Trial, results: Results) -> float | None:
    """The rate whose runs ended lowest; None if the search is not done."""
    tuned = results.tuned
    if not trial.rates and next(searched(trial, tuned), None) is not None:
        return None
    done = _done(trial, tuned)
    return min(done, key=lambda runs: _loss(runs, tuned))[0].rate if done else None


def swept(trial: Trial, results: Results) -> list[Run]:
    """The runs that its rate was chosen from."""
    return list(itertools.chain(*_done(trial, results.tuned)))


def missing(trial: Trial, results: Results) -> Iterator[Run]:
    """Of a search the runs that are not there yet, then those of each seed."""
    yield from searched(trial, results)
    best = best_rate(trial, results)
    assert best is not None  # all of its runs were yielded, and are there by now
    seeds = dict.fromkeys(trial.seeds + trial.tested_on)
    yield from absent(runs_at(trial, best, seeds), results)


def all_missing(trials: Iterable[Trial], results: Results) -> Iterator[Run]:
    """Trial after trial; where rates are given the first rate of all trials first."""
    given: dict[int, list[Run]] = {}
    for trial in trials:
        if not trial.rates:
            yield from missing(trial, results)
        for i, rate in enumerate(trial.rates):
            given.setdefault(i, []).extend(runs_at(trial, rate, trial.seeds))
    yield from absent(itertools.chain(*given.values()), results)


def finished(
    trial: Trial, results: Results, seeds: Iterable[int] | None = None
) -> list[Result]:
    """The results of these seeds at the best rate, as far as there are any."""
    rate = best_rate(trial, results)
    if rate is None:
        return []
    runs = runs_at(trial, rate, trial.seeds if seeds is None else seeds)
    return [found for run in runs if (found := results.get(run.key())) is not None]


def absent(runs: Iterable[Run], results: Results) -> Iterator[Run]:
    return (run for run in runs if results.get(run.key()) is None)


def _at_power(trial: Trial, power: int) -> list[Run]:
    """The runs at one rate that its worth is the mean of."""
    middle = trial.setting.middle(METHODS[trial.method].rate)
    return runs_at(trial, rate_of(middle, power), trial.tuned_on)


def _done(trial: Trial, results: Results) -> list[list[Run]]:
    """The runs of each rate whose runs are all there."""
    tried = [runs_at(trial, rate, trial.seeds) for rate in trial.rates]
    powers = range(min(POWERS) - FURTHER, max(POWERS) + FURTHER + 1)
    tried = tried or [_at_power(trial, power) for power in powers]
    return [runs for runs in tried if not any(absent(runs, results))]


def _loss(runs: list[Run], results: Results) -> float:
    found = [results.get(run.key()) for run in runs]
    if None in found:
        return float("inf")
    return sum(last(x) for x in found if x is not None) / len(runs)
