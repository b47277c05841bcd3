"""Rows of settings in which any two values of two settings meet."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]

_TRIES = 400  # random rows with a pair in them, before it counts as impossible


def _pairs(row: Row) -> set[Pair]:
    return set(itertools.combinations(sorted(row.items(), key=lambda x: x[0]), 2))


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    settled: Callable[[Row, set[str]], Row | None] = lambda row, fixed: row,
    seed: int = 0,
) -> tuple[list[Row], list[Pair]]:
    """A covering array of strength two, and the pairs that no row can have.

    Greedy: the best of 30 random rows each. ``settled`` takes a random row and the
    names that are fixed in it, and returns the row to try, or None if there is none.
    """
    rng = random.Random(seed)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(sorted(factors), 2)
        for x, y in itertools.product(factors[a], factors[b])
    }
    rows: list[Row] = []
    impossible: list[Pair] = []
    while missing:
        due = min(missing, key=lambda pair: (repr(pair)[::-1], repr(pair)))
        fixed = dict(due)
        draws = ({k: rng.choice(x) for k, x in factors.items()} for _ in range(_TRIES))
        kept = (settled(row | fixed, set(fixed)) for row in draws)
        possible = list(itertools.islice(filter(None, kept), 30))
        if possible:
            rows.append(max(possible, key=lambda row: len(_pairs(row) & missing)))
            missing -= _pairs(rows[-1])
        else:
            impossible.append(due)
            missing.remove(due)
    return rows, impossible


def name_of(row: Row, default: Row) -> str:
    """The settings that are not the default, as the name of a test."""
    said = [f"{k}={v}" for k, v in row.items() if v != default[k]]
    return ",".join(said) or "default"
