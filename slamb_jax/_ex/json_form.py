"""The settings of an exchange as JSON, and back."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from slamb_jax._ex.payloads import QUANTIZERS
from slamb_jax._ex.selections import BY_NAME, Schedule

# Objects of the library's own by name, with the settings that need not be written.
_OBJECTS: dict[str, Any] = {name: make() for name, make in BY_NAME.items()}
_OBJECTS |= QUANTIZERS


def to_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name as what JSON can hold."""
    return {name: _write(name, x) for name, x in settings.items()}


def from_json(settings: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """What :func:`to_json` wrote; raises for names that are not known."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"settings must be a mapping, got {settings!r}")
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(
            f"{unknown[0]!r} is not a setting of an Exchange, which has "
            f"{', '.join(sorted(known))}"
        )
    return {name: _read(name, x) for name, x in settings.items()}


def _write(name: str, x: Any) -> Any:
    if x is None or isinstance(x, bool | str):
        return x
    if isinstance(x, numbers.Real):
        return int(x) if isinstance(x, numbers.Integral) else float(x)
    if isinstance(x, PartitionSpec):
        return {"spec": [list(e) if isinstance(e, tuple) else e for e in x]}
    if isinstance(x, list) or (isinstance(x, tuple) and name.endswith("axis_name")):
        return [_write(name, item) for item in x]
    if isinstance(x, Mapping) and (name == "compress_ratio" or _all_strings(x)):
        return {str(key): _write(name, item) for key, item in x.items()}
    if isinstance(x, Schedule):
        phases = {str(step): _write(name, phase) for step, phase in x.phases.items()}
        return {"name": "schedule", "phases": phases}
    for kind, default in _OBJECTS.items():
        if type(x) is type(default) and _bits(x) == _bits(default):
            own = dataclasses.asdict(default)
            settings = dataclasses.asdict(x).items()
            return {"name": kind} | {k: v for k, v in settings if v != own[k]}
    raise ValueError(
        f"{name} must be of the library's own selections and payloads, lists, dicts "
        f"with string keys, specs and bools to be written as JSON, got {x!r}"
    )


def _read(name: str, x: Any) -> Any:
    if isinstance(x, list):
        items = [_read(name, item) for item in x]
        return tuple(items) if name.endswith("axis_name") else items
    if not isinstance(x, Mapping):
        return x
    if name == "compress_ratio":
        return {int(step): ratio for step, ratio in x.items()}
    if name in ("selection", "payload", "average_payload"):
        return _read_object(name, x)
    entries = x.get("spec") if set(x) == {"spec"} else None
    if isinstance(entries, list) and all(
        entry is None or isinstance(entry, str | list) for entry in entries
    ):
        return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))
    return {key: _read(name, item) for key, item in x.items()}


def _read_object(name: str, x: Mapping[str, Any]) -> Any:
    settings = dict(x)
    kind = settings.pop("name", None)
    if kind == "schedule" and set(settings) == {"phases"}:
        phases = settings["phases"].items()
        return Schedule({int(step): _read(name, phase) for step, phase in phases})
    if kind not in _OBJECTS:
        raise ValueError(
            f"{name} must have a name among {', '.join(_OBJECTS)} and schedule, got "
            f"{x!r}"
        )
    try:
        return dataclasses.replace(_OBJECTS[kind], **settings)
    except TypeError as error:
        raise ValueError(f"{name}={x!r} does not fit: {error}") from error


def _all_strings(keys: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) for key in keys)


def _bits(x: Any) -> int | None:
    """The bits of a quantizer, which are part of its name."""
    return getattr(x, "bits", None)
