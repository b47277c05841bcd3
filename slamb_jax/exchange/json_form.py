"""The settings of an exchange as JSON, and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from slamb_jax.exchange.payloads import QUANTIZERS, Payload
from slamb_jax.exchange.selections import BY_NAME, Schedule, Selection


def to_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by name as what JSON can hold."""
    return {name: _WRITERS.get(name, _same)(x) for name, x in settings.items()}


def from_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`to_json` wrote."""
    return {name: _READERS.get(name, _same)(x) for name, x in settings.items()}


def _same(x: Any) -> Any:
    return x


def _axis_to_json(axis_name: Any) -> Any:
    return list(axis_name) if isinstance(axis_name, tuple) else axis_name


def _axis_from_json(axis_name: Any) -> Any:
    return tuple(axis_name) if isinstance(axis_name, list) else axis_name


def _ratio_to_json(ratio: Any) -> Any:
    if isinstance(ratio, Mapping):
        return {str(step): k for step, k in ratio.items()}
    return ratio


def _ratio_from_json(ratio: Any) -> Any:
    if isinstance(ratio, Mapping):
        return {int(step): k for step, k in ratio.items()}
    return ratio


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
        found: dict[int, Any] = {int(t): selection_from_json(x) for t, x in phases}
        return Schedule(found)
    if name not in BY_NAME:
        raise ValueError(
            f"selection must have a name among {', '.join(BY_NAME)} and schedule, got "
            f"{selection!r}"
        )
    try:
        return BY_NAME[name](**settings)
    except TypeError as error:
        raise ValueError(f"selection={selection!r} does not fit: {error}") from error


def payload_to_json(payload: Payload) -> Any:
    """A name, or the settings of a quantizer of the library's own."""
    if payload is None or isinstance(payload, str):
        return payload
    for name, quantizer in QUANTIZERS.items():
        if type(payload) is type(quantizer) and payload.bits == quantizer.bits:  # type: ignore[attr-defined]
            settings = dataclasses.asdict(payload)  # type: ignore[call-overload]
            own = dataclasses.asdict(quantizer)  # type: ignore[call-overload]
            given = {k: x for k, x in settings.items() if x != own[k]}
            return {"name": name, **given}
    raise ValueError(
        f"payload={payload!r} is not one of the library's own and cannot be written "
        "as JSON"
    )


def payload_from_json(payload: Any) -> Payload:
    """What :func:`payload_to_json` wrote."""
    if not isinstance(payload, Mapping):
        return payload
    settings = dict(payload)
    quantizer: Any = QUANTIZERS.get(settings.pop("name", ""))
    if quantizer is None:
        raise ValueError(
            f"payload must have a name among {', '.join(QUANTIZERS)}, got {payload!r}"
        )
    try:
        return dataclasses.replace(quantizer, **settings)
    except TypeError as error:
        raise ValueError(f"payload={payload!r} does not fit: {error}") from error


def layout_to_json(tree: Any) -> Any:
    """Dicts, lists, bools, and for each spec ``{"spec": [...]}``."""
    if tree is None or isinstance(tree, bool):
        return tree
    if isinstance(tree, PartitionSpec):
        return {"spec": [list(e) if isinstance(e, tuple) else e for e in tree]}
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        return {key: layout_to_json(x) for key, x in tree.items()}
    if isinstance(tree, list):
        return [layout_to_json(x) for x in tree]
    raise ValueError(
        "param_specs and stacked must be dicts with string keys, lists, specs and "
        f"bools to be written as JSON, got {tree!r}"
    )


def layout_from_json(tree: Any) -> Any:
    """What :func:`layout_to_json` wrote."""
    if isinstance(tree, dict) and set(tree) == {"spec"} and _is_entries(tree["spec"]):
        entries = (tuple(e) if isinstance(e, list) else e for e in tree["spec"])
        return PartitionSpec(*entries)
    if isinstance(tree, dict):
        return {key: layout_from_json(x) for key, x in tree.items()}
    if isinstance(tree, list):
        return [layout_from_json(x) for x in tree]
    return tree


def _is_entries(x: Any) -> bool:
    return isinstance(x, list) and all(
        e is None or isinstance(e, str | list) for e in x
    )


_WRITERS = {
    "axis_name": _axis_to_json,
    "local_axis_name": _axis_to_json,
    "compress_ratio": _ratio_to_json,
    "selection": selection_to_json,
    "payload": payload_to_json,
    "average_payload": payload_to_json,
    "param_specs": layout_to_json,
    "stacked": layout_to_json,
}
_READERS = {
    "axis_name": _axis_from_json,
    "local_axis_name": _axis_from_json,
    "compress_ratio": _ratio_from_json,
    "selection": selection_from_json,
    "payload": payload_from_json,
    "average_payload": payload_from_json,
    "param_specs": layout_from_json,
    "stacked": layout_from_json,
}
