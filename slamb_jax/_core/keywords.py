"""Errors of unknown keyword arguments, which name the one that is meant."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Make = TypeVar("Make", bound=Callable[..., Any])

_SHARE = "selection=slamb_jax.selections.Strided(compress_ratio), of an Exchange"
_MEANT = dict.fromkeys(("compress_ratio", "k", "topk"), _SHARE) | {
    "H": "sync_every, of an Exchange",
    "b3": "b3, of slamb_jax.slamb",
    "beta1": "b1",
    "beta2": "b2",
    "beta3": "b3, of slamb_jax.slamb",
    "betas": "b1 and b2",
    "lr": "learning_rate",
}
"""Ours, by what the SLAMB paper and PyTorch say."""


def explain_unknown(make: Make) -> Make:
    """Lets the error of an unknown keyword argument say which one may be meant."""
    known = [*inspect.signature(make).parameters]
    name = make.__qualname__.removesuffix(".__init__")

    @functools.wraps(make)
    def made(*args: Any, **given: Any) -> Any:
        for unknown in given.keys() - known:
            close = difflib.get_close_matches(unknown, known, 1)
            meant = _MEANT.get(unknown) or "".join(close) or f"one of {known}"
            raise TypeError(
                f"{name} got an unexpected keyword argument {unknown!r}: give {meant}"
            )
        return make(*args, **given)

    return made  # type: ignore[return-value]
