"""The same small sweep of rates for every method, and the runs that follow from it."""

import itertools
from collections.abc import Iterable, Iterator

from benchmarks.frontier.grid import (
    AT_TWO_RATES,
    CLAIMED,
    SEEDS,
    TESTED_ON,
    TUNED_ON,
    Setting,
)
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.results import Result, Results, last_loss, rate_of
from benchmarks.frontier.run import Run

POWERS = (-1, 0, 1)  # of the root of two, times the middle of the method's rates
FURTHER = 6  # more on a side, while the best stands at that end


def rates(setting: Setting, method: str, results: Results) -> Iterator[Run]:
    """The runs of the sweep that are still missing."""
    if setting in AT_TWO_RATES:
        for power in AT_TWO_RATES[setting]:
            yield from _absent(_runs(setting, method, power), results)
        return
    powers = list(POWERS)
    while True:
        runs = {p: _runs(setting, method, p) for p in powers}
        yield from _absent(itertools.chain(*runs.values()), results)
        # Where all diverged the lowest counts as the best, and lower ones follow.
        best = min(powers, key=lambda p: (_loss(runs[p], results), p))
        if best == max(powers) < max(POWERS) + FURTHER:
            powers.append(best + 1)
        elif best == min(powers) > min(POWERS) - FURTHER:
            powers.append(best - 1)
        else:
            return


def best_rate(setting: Setting, method: str, results: Results) -> float | None:
    """The rate whose sweep ended lowest; None if the sweep is not done."""
    tuned = results.tuned
    if next(rates(setting, method, tuned), None) is not None:
        return None
    done = _done(setting, method, tuned)
    return min(done, key=lambda runs: _loss(runs, tuned))[0].rate


def swept(setting: Setting, method: str, results: Results) -> Iterator[Run]:
    """The runs that its rate was chosen from."""
    for runs in _done(setting, method, results.tuned):
        yield from runs


def missing(setting: Setting, method: str, results: Results) -> Iterator[Run]:
    """The runs that are not there yet: those of the sweep, then each seed."""
    yield from rates(setting, method, results)
    rate = best_rate(setting, method, results)
    assert rate is not None  # all of its runs were yielded, and are there by now
    if setting in AT_TWO_RATES:
        return
    claimed = CLAIMED.get(setting, {})
    more = TESTED_ON if method in {*claimed, *claimed.values()} else ()
    seeds = dict.fromkeys(SEEDS + more)
    yield from _absent((Run(setting, method, rate, seed) for seed in seeds), results)


def all_missing(
    pairs: Iterable[tuple[Setting, str]], results: Results
) -> Iterator[Run]:
    """Pair after pair; of settings at two rates the first rate of all pairs first."""
    few: dict[int, list[Run]] = {}
    for setting, method in pairs:
        if setting not in AT_TWO_RATES:
            yield from missing(setting, method, results)
        for i, power in enumerate(AT_TWO_RATES.get(setting, ())):
            few.setdefault(i, []).extend(_runs(setting, method, power))
    yield from _absent(itertools.chain(*few.values()), results)


def finished(
    setting: Setting, method: str, results: Results, seeds: Iterable[int] = SEEDS
) -> list[Result]:
    """The results of these seeds at the tuned rate, as far as there are any."""
    rate = best_rate(setting, method, results)
    if rate is None:
        return []
    runs = [Run(setting, method, rate, seed) for seed in seeds]
    return [found for run in runs if (found := results.get(run.key())) is not None]


def _runs(setting: Setting, method: str, power: int) -> list[Run]:
    """The runs at one rate that its worth is the mean of."""
    rate = rate_of(setting.middle(METHODS[method].rate), power)
    seeds = TUNED_ON.get(setting, SEEDS[:1])
    return [Run(setting, method, rate, seed) for seed in seeds]


def _done(setting: Setting, method: str, results: Results) -> Iterator[list[Run]]:
    """The runs of each rate whose runs are all there."""
    for power in range(min(POWERS) - FURTHER, max(POWERS) + FURTHER + 1):
        runs = _runs(setting, method, power)
        if not any(_absent(runs, results)):
            yield runs


def _absent(runs: Iterable[Run], results: Results) -> Iterator[Run]:
    return (run for run in runs if results.get(run.key()) is None)


def _loss(runs: list[Run], results: Results) -> float:
    found = [results.get(run.key()) for run in runs]
    if None in found:
        return float("inf")
    return sum(last_loss(x) for x in found if x is not None) / len(runs)
