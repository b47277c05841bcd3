r"""Which coordinates travel at a step: pure functions of step, leaf and shape.

A selection answers for one :class:`Leaf` at one step ``t = 1, 2, ...``: the rows of
neighbours that travel, :math:`M_t`, and the age :math:`\tau` of each row (steps since
it was last exchanged, ``t`` if it never was). Every worker computes the same answer; no
mask ever travels, and nothing is kept from step to step (but by ``TopK``, which chooses
by what was exchanged before, and keeps its choice in the optimizer's state).
"""

from collections.abc import Callable, Mapping

from slamb_jax._checks import check_choice
from slamb_jax._selections._bernoulli import Bernoulli as Bernoulli
from slamb_jax._selections._piecewise import Piecewise as Piecewise
from slamb_jax._selections._piecewise import by_phase as by_phase
from slamb_jax._selections._replay import replay_masks as replay_masks
from slamb_jax._selections._round_robin import Permutation as Permutation
from slamb_jax._selections._round_robin import Strided as Strided
from slamb_jax._selections._rows import Rows as Rows
from slamb_jax._selections._rows import age_at as age_at
from slamb_jax._selections._rows import elements_sent as elements_sent
from slamb_jax._selections._rows import rows_at as rows_at
from slamb_jax._selections._selection import Selection as Selection
from slamb_jax._selections._selection import is_selection
from slamb_jax._selections._top_k import Chosen as Chosen
from slamb_jax._selections._top_k import ChosenRows as ChosenRows
from slamb_jax._selections._top_k import Kept as Kept
from slamb_jax._selections._top_k import TopK as TopK
from slamb_jax._selections._top_k import chosen_last as chosen_last
from slamb_jax._selections._top_k import chosen_now as chosen_now
from slamb_jax._selections._top_k import kept_at_first as kept_at_first
from slamb_jax._selections._top_k import learned as learned

_BY_NAME: dict[str, Callable[[float, int, int], Selection]] = {
    "strided": Strided,
    "permutation": Permutation,
    "bernoulli": Bernoulli,
    "top_k": TopK,
}


def make_selection(
    selection: str | Selection,
    compress_ratio: float | Mapping[int, float],
    min_size: int,
    seed: int,
) -> Selection:
    """A selection by its name, with these settings, or the object itself."""
    if isinstance(selection, str):
        check_choice("selection", selection, tuple(_BY_NAME))
        make = _BY_NAME[selection]
        if not isinstance(compress_ratio, Mapping):
            return make(compress_ratio, min_size, seed)
        if make is TopK:
            raise ValueError(
                "compress_ratio must be a number with selection='top_k', whose choice "
                f"has a state, got {dict(compress_ratio)!r}"
            )
        phases = {t: make(k, min_size, seed) for t, k in compress_ratio.items()}
        try:
            return Piecewise(phases)
        except ValueError as error:
            raise ValueError(
                "compress_ratio must have steps from 0 on, one of them 0, where it is "
                f"a mapping, got {dict(compress_ratio)!r}"
            ) from error
    return check_selection(selection)


def check_selection(selection: Selection) -> Selection:
    """Raises unless ``selection`` is an object with the protocol's methods."""
    if not is_selection(selection):
        raise ValueError(
            f"selection must be one of {', '.join(_BY_NAME)} or an object with the "
            f"methods of slamb_jax.Selection, got {selection!r}"
        )
    return selection
