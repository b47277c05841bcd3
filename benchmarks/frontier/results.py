"""Results as data: one JSON line a run, appended when the run is done."""

import json
from pathlib import Path
from typing import Any

Key = tuple[tuple[str, Any], ...]


def as_key(key: dict[str, Any]) -> Key:
    return tuple(sorted(key.items()))


class Results:
    """The results in a file, found again by what was run."""

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[Key, dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                result = json.loads(line)
                self.found[as_key(result["key"])] = result
            except (ValueError, KeyError) as error:
                raise SystemExit(f"{path}:{number} is not a result: {error}") from error

    def get(self, key: dict[str, Any]) -> dict[str, Any] | None:
        return self.found.get(as_key(key))

    def add(self, result: dict[str, Any]) -> None:
        self.found[as_key(result["key"])] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def last_loss(result: dict[str, Any]) -> float:
    """The evaluation loss in the end; infinite if it was not finite."""
    loss = result["points"][-1]["loss"]
    return float("inf") if loss is None else loss
