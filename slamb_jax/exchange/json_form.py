"""Settings of an exchange as what JSON and YAML can hold."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from slamb_jax.exchange.selections import Strided


def value_to_json(name: str, x: Any) -> Any:
    """The value of a setting as JSON has it; raises for one that is not of data."""
    # Names and numbers are themselves.
    if x is None or isinstance(x, bool | int | str):
        return x
    if isinstance(x, Strided):
        return dataclasses.asdict(x)
    # A spec is told from a list of a tree by its key.
    if isinstance(x, PartitionSpec):
        return {"spec": [list(e) if isinstance(e, tuple) else e for e in x]}
    # JSON has no tuples: those of axis names become lists, and are told by the name.
    if isinstance(x, list) or (isinstance(x, tuple) and name.endswith("axis_name")):
        return [value_to_json(name, item) for item in x]
    if isinstance(x, Mapping) and all(isinstance(key, str) for key in x):
        return {key: value_to_json(name, item) for key, item in x.items()}
    raise ValueError(
        f"{name} must be of names, numbers, lists, dicts with string keys, specs and "
        f"Strided to be written as JSON, got {x!r}"
    )


def value_from_json(name: str, x: Any) -> Any:
    """Undoes :func:`value_to_json`."""
    if isinstance(x, list):
        items = [value_from_json(name, item) for item in x]
        return tuple(items) if name.endswith("axis_name") else items
    if not isinstance(x, Mapping):
        return x
    if name == "selection":
        try:
            return Strided(**x)
        except TypeError as error:
            raise ValueError(f"selection={x!r} does not fit: {error}") from error
    # A tree may have a leaf named "spec", too: its entries are no names.
    entries = x.get("spec") if set(x) == {"spec"} else None
    if isinstance(entries, list) and all(
        entry is None or isinstance(entry, str | list) for entry in entries
    ):
        return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))
    return {key: value_from_json(name, item) for key, item in x.items()}
