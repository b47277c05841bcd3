"""Which devices take part in a collective together, as XLA writes it."""

import math
import re
from typing import Any

import numpy as np
from jax.sharding import Mesh

Groups = frozenset[frozenset[int]]


def groups_along(mesh: Mesh, axis_name: Any) -> Groups:
    """The groups of devices, by their places on the mesh, along an axis or axes."""
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for name in names:
        if not isinstance(mesh, Mesh) or name not in mesh.axis_names:
            raise ValueError(f"mesh must have the axis {name!r}, got {mesh!r}")
    sizes = dict(mesh.shape)
    return _along({str(name): sizes[name] for name in mesh.axis_names}, names)


def parse_groups(text: str) -> Groups | None:
    """Replica groups in any of XLA's notations; None if they cannot be told."""
    if text.startswith("{{"):
        lists = re.findall(r"\{([\d,]+)\}", text)
        return frozenset(frozenset(map(int, x.split(","))) for x in lists)
    iota = r"\[(\d+),(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?"
    if found := re.fullmatch(iota, text):
        shape = [int(x) for x in found[3].split(",")]
        ids = np.arange(math.prod(shape)).reshape(shape)
        if found[4]:
            ids = ids.transpose([int(x) for x in found[4].split(",")])
        return _rows(ids.reshape(int(found[1]), int(found[2])))
    if found := re.fullmatch(r"mesh\[(.*?)\]\s*\{(.*?)\}", text):
        sizes = {k: int(n) for k, n in re.findall(r"'([^']*)'=(\d+)", found[1])}
        return _along(sizes, re.findall(r"'([^']*)'", found[2]))
    return None


def _along(sizes: dict[str, int], names: Any) -> Groups:
    ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    places = [list(sizes).index(str(name)) for name in names]
    ids = np.moveaxis(ids, places, range(-len(places), 0))
    return _rows(ids.reshape(-1, math.prod(sizes[str(name)] for name in names)))


def _rows(ids: np.ndarray) -> Groups:
    return frozenset(frozenset(row) for row in ids.tolist())
