"""Which settings of an exchange there are, and which of them go together."""

from typing import TYPE_CHECKING

from slamb_jax._core.axes import as_tuple
from slamb_jax._core.checks import (
    check_axis_name,
    check_bool,
    check_integer,
    check_transformation,
)
from slamb_jax.exchange.codecs import CODECS
from slamb_jax.exchange.selections import Selection

if TYPE_CHECKING:  # it stands above this file
    from slamb_jax.exchange.settings import Exchange


def check_settings(exchange: "Exchange") -> None:
    """Raises for a value out of range, and for settings that cannot go together."""
    payload, selection = exchange.payload, exchange.selection
    check_bool("overlap", exchange.overlap)
    is_name = isinstance(payload, str) and payload in ("bfloat16", *CODECS)
    if payload is not None and not is_name:
        raise ValueError(
            "payload must be None, 'bfloat16', 'uniform8', 'uniform4', 'ternary', "
            "'sign' or 'largest_of_N' with N from 2 to 127, such as 'largest_of_7', "
            f"got {payload!r}"
        )
    if exchange.sync_every is not None:
        check_integer("sync_every", exchange.sync_every, 1)
    if exchange.outer is not None:
        check_transformation("outer", exchange.outer)
    if selection is not None and not isinstance(selection, Selection):
        raise ValueError(
            "selection must be None or a slamb_jax.selections.Selection, such as "
            f"Strided(0.1), got {selection!r}"
        )
    if selection is not None and exchange.outer is not None:
        raise ValueError(
            f"selection={selection!r} averages the parameters themselves every "
            f"sync_every steps: it takes no outer optimizer, got {exchange!r}"
        )
    _check_average(exchange)
    _check_axes(exchange)


def _check_average(exchange: "Exchange") -> None:
    payload, every, outer = exchange.payload, exchange.sync_every, exchange.outer
    selects = exchange.selection is not None
    if every is None and not selects and exchange.axis_name is not None:
        raise ValueError(
            "sync_every=None without a selection exchanges nothing between "
            f"{exchange.axis_name!r}: give one of them, or no axis_name"
        )
    if outer is not None and every is None:
        raise ValueError("outer needs an average: give sync_every too, got None")
    if outer is not None and str(payload).startswith("largest_of_"):
        raise ValueError(
            f"payload={payload!r} sends one coordinate of each group, and the others "
            "would be lost from the parameters' difference that an outer optimizer "
            "gets: take 'ternary', 'uniform4' or 'uniform8'"
        )
    if outer is None and every not in (None, 1) and payload is not None and not selects:
        raise ValueError(
            f"sync_every={every} averages parameters, which payload={payload!r} would "
            "round: give outer=optax.sgd(1.0), whose difference to the last average is "
            "rounded instead, or payload=None. To send less at every step take "
            "payload='largest_of_7'"
        )


def _check_axes(exchange: "Exchange") -> None:
    check_axis_name(exchange.axis_name)
    check_axis_name(exchange.local_axis_name, "local_axis_name")
    names = exchange.axis_name, exchange.local_axis_name
    between, within = (set(as_tuple(name)) for name in names)
    if within and (not between or between & within):
        raise ValueError(
            "local_axis_name must name other mesh axes than axis_name, the axis "
            f"between the workers, got {exchange.local_axis_name!r} and "
            f"{exchange.axis_name!r}"
        )
    if exchange.layout is None:  # which checks param_specs and stacked
        return
    if shared := between & set(exchange.shard_axes):
        raise ValueError(
            "param_specs must not name the axis of the workers, "
            f"{min(map(str, shared))!r}: every worker has parameters of its own, "
            "sharded over other axes of the mesh"
        )
