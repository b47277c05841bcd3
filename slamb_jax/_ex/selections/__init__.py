"""Which coordinates are exchanged at a step."""

from collections.abc import Callable

from slamb_jax._ex.selections.bernoulli import Bernoulli
from slamb_jax._ex.selections.permutation import Permutation
from slamb_jax._ex.selections.replay import replay_masks
from slamb_jax._ex.selections.schedule import Schedule
from slamb_jax._ex.selections.selection import Selection, elements_sent
from slamb_jax._ex.selections.strided import Strided
from slamb_jax._leaves import Leaf

__all__ = [
    "BY_NAME",
    "Bernoulli",
    "Leaf",
    "Permutation",
    "Schedule",
    "Selection",
    "Strided",
    "check_selection",
    "elements_sent",
    "replay_masks",
]

BY_NAME: dict[str, Callable[..., Selection]] = {
    "strided": Strided,
    "permutation": Permutation,
    "bernoulli": Bernoulli,
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
