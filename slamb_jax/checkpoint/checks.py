"""Whether a state may be saved, and one that was saved be gone on with."""

import re
from typing import Any

import jax.numpy as jnp

from slamb_jax.exchange import Exchange, check_exchange

_SELECTS = ("selection", "sync_every")


def selects_of(exchange: Exchange | None) -> dict[str, str]:
    """The settings that say which coordinates are exchanged when, as text."""
    if exchange is None:
        return {}
    shown = {name: repr(getattr(check_exchange(exchange), name)) for name in _SELECTS}
    return {name: re.sub(r" at 0x[0-9a-f]+", "", x) for name, x in shown.items()}


def another_selection(saved: dict[str, str], own: dict[str, str]) -> str:
    """What is another than was saved, in words; nothing where one is not known."""
    changed = [
        f"{name}={own[name]} where it was {saved[name]}"
        for name in own
        if name in saved and own[name] != saved[name]
    ]
    if not changed:
        return ""
    return (
        f"another exchange: {', '.join(changed)}. The ages of coordinates are wrong "
        "until each has had its turn"
    )


def check_count(name: str, x: Any, apart: int, n: int) -> None:
    """Raises for an optimizer's count of steps that differs between workers."""
    of_steps = name.endswith(".count") and jnp.issubdtype(x.dtype, jnp.integer)
    if apart and of_steps and x.ndim == 1:
        raise ValueError(
            f"state{name} must be the same on all workers, and {apart} of {n} have "
            "another than the first: a step was skipped on some of them only. Skip it "
            "on all with slamb_jax.skip_not_finite"
        )
