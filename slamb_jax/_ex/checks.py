"""What the settings of an exchange must satisfy, each alone and together."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from slamb_jax._axes import as_tuple
from slamb_jax._checks import (
    check_axis_name,
    check_bool,
    check_integer,
    check_range,
    check_transformation,
)
from slamb_jax._ex.payloads import LargestOf, check_payload, resolve_payload
from slamb_jax._ex.selections import BY_NAME, check_selection
from slamb_jax._layout import mesh_axes

if TYPE_CHECKING:
    from slamb_jax.exchange import Exchange


def check_settings(exchange: "Exchange") -> None:
    """Raises for a value out of range, and for settings that cannot go together."""
    check_bool("overlap", exchange.overlap)
    if exchange.rolling is not None:
        check_bool("rolling", exchange.rolling)
    b3: Any = exchange.b3
    if isinstance(b3, jax.Array):  # which has no hash
        raise ValueError(f"b3 must be a number, got an array: {b3!r}")
    check_range("b3", b3, 0.0, 1.0)
    for name in ("payload", "average_payload"):
        if (payload := getattr(exchange, name)) is not None:
            check_payload(name, payload)
    if exchange.sync_every is not None:
        check_integer("sync_every", exchange.sync_every, 1)
    if exchange.average_b2 is not None:
        check_range("average_b2", exchange.average_b2, 0.0, 1.0, open_high=True)
    if exchange.outer is not None:
        check_transformation("outer", exchange.outer)
    _check_average(exchange)
    _check_selection(exchange)
    _check_axes(exchange)
    alone = exchange.axis_name is None
    if not (alone or exchange.sync_every or exchange.exchanges_momentum):
        raise ValueError(
            "sync_every=None and no compress_ratio exchange nothing between "
            f"{exchange.axis_name!r}: give one of them, or no axis_name"
        )


def check_parameters_payload(exchange: "Exchange") -> None:
    """Raises for an average of parameters that would lose nearly all of them."""
    payload = resolve_payload(exchange.average_payload)
    if isinstance(payload, LargestOf) and not payload.error_feedback:
        raise ValueError(
            f"average_payload={exchange.average_payload!r} sends one coordinate of "
            "each group, and parameters that workers average after steps of their own "
            "(sync_every above 1, outer, compress_ratio, muon) would lose the others: "
            "take 'ternary', or LargestOf(error_feedback=True)"
        )


def check_ratios(ratios: Mapping[Any, Any]) -> None:
    """Raises for a schedule of ratios that cannot be followed."""
    for step in ratios:
        check_integer("compress_ratio (a step)", step, 0)
    if 0 not in ratios:
        raise ValueError(
            "compress_ratio must have the step 0 where it is a mapping, got "
            f"{dict(sorted(ratios.items()))!r}"
        )


def _check_average(exchange: "Exchange") -> None:
    if exchange.sync_every is None:
        for name in ("rolling", "average_payload", "average_b2", "outer"):
            value = getattr(exchange, name)
            if value and value != _default(exchange, name):
                raise ValueError(
                    f"{name}={value!r} needs an average: give sync_every too, got None"
                )
    elif not exchange.averages_momentum:
        check_parameters_payload(exchange)
    given = exchange.average_b2 not in (None, _default(exchange, "average_b2"))
    if given and (exchange.average_payload is None or exchange.outer is not None):
        raise ValueError(
            f"average_b2={exchange.average_b2!r} needs an average_payload, whose mean "
            "it normalizes, and no outer optimizer, which does as it likes with it"
        )
    if exchange.rolling and exchange.outer is not None:
        raise ValueError(
            "rolling=True and outer cannot go together: an outer optimizer steps from "
            "one average of all parameters to the next"
        )


def _check_selection(exchange: "Exchange") -> None:
    chosen = exchange.selection
    if not isinstance(chosen, str) or chosen not in BY_NAME:
        check_selection(chosen)
        for name in ("compress_ratio", "min_size", "seed"):
            if (value := getattr(exchange, name)) is not None:
                raise ValueError(
                    f"{name}={value!r} and selection={chosen!r} cannot both be given: "
                    f"a selection object has its own {name}"
                )
    if not exchange.exchanges_momentum:
        for name in ("payload", "selection"):
            value = getattr(exchange, name)
            if value is not None and value != _default(exchange, name):
                raise ValueError(
                    f"{name}={value!r} is of the momentum, of which nothing is "
                    "exchanged: give a compress_ratio above 0"
                )
    exchange.selection_for(())  # checks ratio, smallest size and seed


def _default(exchange: "Exchange", name: str) -> Any:
    """Of a setting: what was not given may stand where it has nothing to say."""
    return type(exchange).__dataclass_fields__[name].default


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
    if exchange.layout is None or exchange.param_specs is None:  # layout checks both
        return
    if shared := between & set(mesh_axes(exchange.param_specs)):
        raise ValueError(
            "param_specs must not name the axis of the workers, "
            f"{min(map(str, shared))!r}: every worker has parameters of its own, "
            "sharded over other axes of the mesh"
        )
