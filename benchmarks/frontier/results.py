"""Results as data: one JSON line for each run, appended when the run is done."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

Result = dict[str, Any]


class Results:
    """The results in a file, found again by their keys.

    Args:
      path: the file.
      tuned: the results in which rates are chosen; None: these.
    """

    def __init__(self, path: Path, tuned: "Results | None" = None) -> None:
        self.path, self.tuned = path, tuned or self
        self._found: dict[str, Result] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                result = json.loads(line)
                self._found[_as_text(result["key"])] = result
            except (ValueError, KeyError) as error:
                raise SystemExit(f"{path}:{number} is not a result: {error}") from error

    def __iter__(self) -> Iterator[Result]:
        return iter(self._found.values())

    def get(self, key: dict[str, Any]) -> Result | None:
        return self._found.get(_as_text(key))

    def add(self, result: Result) -> None:
        self._found[_as_text(result["key"])] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def once(self, key: dict[str, Any], run: Callable[[], float]) -> float:
        """The loss in the end, of a run that is made if it is not there."""
        if (known := self.get(key)) is None:
            end = float(run())
            known = {
                "key": key,
                "points": [{"loss": end if math.isfinite(end) else None}],
            }
            self.add(known)
            Console().print(f"{end:.3f}  {key}", highlight=False)
        return last_loss(known)


def lowest(at: Callable[[int], float], start: int) -> int:
    """The power of a rate that ends lowest, found by steps of one."""
    power = start
    while (best := min((power, power - 1, power + 1), key=at)) != power:
        power = best
    return power


def rate_of(middle: float, power: int) -> float:
    """The rate at a power of the root of two times the middle, to three digits."""
    return float(f"{middle * 2 ** (power / 2):.3g}")


def last_loss(result: Result) -> float:
    """The evaluation loss in the end; infinite if it was not finite."""
    loss = result["points"][-1]["loss"]
    return float("inf") if loss is None else float(loss)


def _as_text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
