"""Which coordinates are exchanged at a step: selections, without state or with one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from slamb_jax._tree.leaves import Leaf as Leaf
from slamb_jax.exchange.selections.bernoulli import Bernoulli as Bernoulli
from slamb_jax.exchange.selections.blocks import Blocks as Blocks
from slamb_jax.exchange.selections.blocks import SelectionAtStep as SelectionAtStep
from slamb_jax.exchange.selections.blocks import elements_sent as elements_sent
from slamb_jax.exchange.selections.replay import replay_masks as replay_masks
from slamb_jax.exchange.selections.round_robin import Permutation as Permutation
from slamb_jax.exchange.selections.round_robin import Strided as Strided
from slamb_jax.exchange.selections.schedule import Schedule as Schedule
from slamb_jax.exchange.selections.selection import Selection as Selection
from slamb_jax.exchange.selections.selection import State as State
from slamb_jax.exchange.selections.top_k import TopK as TopK
from slamb_jax.exchange.selections.top_k import TopKState as TopKState

__all__ = [
    "Bernoulli",
    "Leaf",
    "Permutation",
    "Schedule",
    "Selection",
    "Strided",
    "TopK",
    "TopKState",
    "replay_masks",
]

BY_NAME: dict[str, Callable[[float, int, int], Selection]] = {
    "strided": Strided,
    "permutation": Permutation,
    "bernoulli": Bernoulli,
    "top_k": TopK,
}
"""Selections by name, each made of a ratio, a smallest size and a seed."""


def check_selection(selection: object) -> Selection:
    """Raises unless it is a selection, made and not its class."""
    if not isinstance(selection, Selection):
        raise ValueError(
            f"selection must be one of {', '.join(BY_NAME)} or a "
            f"slamb_jax.selections.Selection, got {selection!r}"
        )
    return selection


def selection_to_json(selection: str | Selection) -> Any:
    """A name, or the settings of a selection of the library's own."""
    if isinstance(selection, str):
        return selection
    if isinstance(selection, Schedule):
        phases = {str(t): selection_to_json(x) for t, x in selection.phases.items()}
        return {"name": "schedule", "phases": phases}
    for name, kind in BY_NAME.items():
        if type(selection) is kind:
            return {"name": name, **dataclasses.asdict(selection)}  # type: ignore[call-overload]
    raise ValueError(
        f"selection={selection!r} is not one of the library's own and cannot be "
        "written as JSON"
    )


def selection_from_json(selection: Any) -> str | Selection:
    """What :func:`selection_to_json` wrote."""
    if not isinstance(selection, Mapping):
        return selection
    settings = dict(selection)
    name = settings.pop("name", None)
    if name == "schedule" and set(settings) == {"phases"}:
        phases = settings["phases"].items()
        return Schedule({int(t): selection_from_json(x) for t, x in phases})
    if name not in BY_NAME:
        raise ValueError(
            f"selection must have a name among {', '.join(BY_NAME)} and schedule, got "
            f"{selection!r}"
        )
    try:
        return BY_NAME[name](**settings)
    except TypeError as error:
        raise ValueError(f"selection={selection!r} does not fit: {error}") from error
