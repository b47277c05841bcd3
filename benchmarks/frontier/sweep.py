"""The same small sweep of rates for every method, and the runs that follow from it."""

from collections.abc import Iterator

from benchmarks.frontier.grid import SEEDS, Setting
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.results import Result, Results, last_loss
from benchmarks.frontier.run import Run

POWERS = (-1, 0, 1)  # of the root of two, times the middle of the method's rates
FURTHER = 6  # more on a side, while the best stands at that end


def rates(setting: Setting, method: str, results: Results) -> Iterator[Run]:
    """The runs of the sweep that are still missing, one seed each."""
    powers = list(POWERS)
    while True:
        runs = {p: _run(setting, method, p) for p in powers}
        yield from (run for run in runs.values() if results.get(run.key()) is None)
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
    if next(rates(setting, method, results), None) is not None:
        return None
    runs = swept(setting, method, results)
    return min(runs, key=lambda run: _loss(run, results)).rate


def swept(setting: Setting, method: str, results: Results) -> Iterator[Run]:
    """The runs that its rate was chosen from."""
    span = range(min(POWERS) - FURTHER, max(POWERS) + FURTHER + 1)
    runs = (_run(setting, method, p) for p in span)
    return (run for run in runs if results.get(run.key()) is not None)


def missing(setting: Setting, method: str, results: Results) -> Iterator[Run]:
    """The runs that are not there yet: those of the sweep, then each seed."""
    yield from rates(setting, method, results)
    rate = best_rate(setting, method, results)
    assert rate is not None  # all of its runs were yielded, and are there by now
    runs = (Run(setting, method, rate, seed) for seed in SEEDS)
    yield from (run for run in runs if results.get(run.key()) is None)


def finished(setting: Setting, method: str, results: Results) -> list[Result]:
    """The results of all seeds at the tuned rate, as far as there are any."""
    rate = best_rate(setting, method, results)
    if rate is None:
        return []
    runs = [Run(setting, method, rate, seed) for seed in SEEDS]
    return [found for run in runs if (found := results.get(run.key())) is not None]


def _run(setting: Setting, method: str, power: int) -> Run:
    rate = setting.middle(METHODS[method].rate) * 2 ** (power / 2)
    return Run(setting, method, float(f"{rate:.3g}"), SEEDS[0])


def _loss(run: Run, results: Results) -> float:
    found = results.get(run.key())
    return float("inf") if found is None else last_loss(found)
