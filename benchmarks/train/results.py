"""Results as data: one JSON line for each run, appended when the run is done.

A line has the run's key; for each evaluation its step, the loss (null where it is not
finite), the bytes that each worker has sent, and what else was measured; the seconds of
a step and of the run; and the hardware. Lines of programs that went before have the
last evaluation alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def last(result: Result, measure: str = "loss") -> float:
    """What was measured last; infinite for a loss that was not finite."""
    value = result["points"][-1].get(measure)
    return float("inf") if value is None else float(value)


def _as_text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
