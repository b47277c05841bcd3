"""Parameters beside those that an average gets: whose optimizer is another's."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import chex
import jax
import optax

_SEEN: contextvars.ContextVar[list[chex.ArrayTree] | None] = contextvars.ContextVar(
    "the parameters that the averages of the step being traced get", default=None
)


@contextlib.contextmanager
def seen_by_averages() -> Iterator[list[chex.ArrayTree]]:
    """The parameters that averages are traced with, meanwhile."""
    seen: list[chex.ArrayTree] = []
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


def see(params: chex.ArrayTree) -> None:
    """Tells that an average gets these parameters, some of which may be masked."""
    if (seen := _SEEN.get()) is not None:
        seen.append(params)


def left_out(state: chex.ArrayTree, seen: list[chex.ArrayTree]) -> list[int]:
    """The numbers of the leaves of a state that are masked for every average.

    Where the parameters lie in the state is known by those that are not masked; not
    where a step changes them before it hands them over.
    """
    flat = [(path, x) for path, x in _leaves(state) if not _is_masked(x)]
    place = {id(x): path for path, x in flat}
    averaged, masked = set(), set()
    for params in seen:
        rows = _leaves(params)
        found = [(path, place.get(id(x), ())) for path, x in rows]
        roots = {
            there[: len(there) - len(path)]
            for path, there in found
            if there and there[len(there) - len(path) :] == path
        }
        averaged |= {there for _, there in found}
        masked |= {r + path for path, x in rows if _is_masked(x) for r in roots}
    return [
        i
        for i, (path, _) in enumerate(flat)
        if path not in averaged
        and any(path[:n] in masked for n in range(1, len(path) + 1))
    ]


def _leaves(tree: chex.ArrayTree) -> list[tuple[tuple[str, ...], Any]]:
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_masked)
    return [(tuple(map(str, path)), x) for path, x in flat]


def _is_masked(x: object) -> bool:
    return isinstance(x, optax.MaskedNode)
