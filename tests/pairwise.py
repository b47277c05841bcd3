"""Rows of settings in which any two values of two settings meet."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def _pairs(row: Row) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(row.items(), key=lambda x: x[0]), 2))


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[Row]:
    """A covering array of strength two; greedy, the best of 60 random rows each."""
    rng = random.Random(seed)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(sorted(factors), 2)
        for x, y in itertools.product(factors[a], factors[b])
    }
    while missing:
        due = sorted(missing, key=repr)
        rows = [
            {name: rng.choice(values) for name, values in factors.items()}
            | dict(rng.choice(due))
            for _ in range(60)
        ]
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        yield best


def name_of(row: Row, default: Row) -> str:
    """The settings that are not the default, as the name of a test."""
    said = [f"{k}={v}" for k, v in row.items() if v != default[k]]
    return ",".join(said) or "default"
