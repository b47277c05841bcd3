"""Which coordinates are exchanged at a step: selections, without state or with one."""

from collections.abc import Callable

from slamb_jax._tree.leaves import Leaf as Leaf
from slamb_jax.exchange.selections.bernoulli import Bernoulli as Bernoulli
from slamb_jax.exchange.selections.permutation import Permutation as Permutation
from slamb_jax.exchange.selections.replay import replay_masks as replay_masks
from slamb_jax.exchange.selections.schedule import Schedule as Schedule
from slamb_jax.exchange.selections.selection import Selection as Selection
from slamb_jax.exchange.selections.selection import State as State
from slamb_jax.exchange.selections.selection import elements_sent as elements_sent
from slamb_jax.exchange.selections.strided import Strided as Strided
from slamb_jax.exchange.selections.top_k import TopK as TopK
from slamb_jax.exchange.selections.top_k import TopKState as TopKState

BY_NAME: dict[str, Callable[..., Selection]] = {
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
