"""Parses replica groups: which devices take part in a collective together."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

_LISTS = re.compile(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\s*\{[\d,]*\})*)\}"
)
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}")
_SLICES = re.compile(r'_megascale_target="?([^"\s]*?)"?,_xla')


@dataclasses.dataclass(frozen=True)
class Groups:
    """The replica groups of a collective.

    Attributes:
      size: devices (or TPU slices) of one group; None where the text does not tell.
      members: the devices of each group, by their positions on the mesh; of a permute,
        each pair of source and target. None where the text does not list them.
    """

    size: int | None
    members: frozenset[frozenset[int]] | None = None

    @classmethod
    def along(cls, mesh: Mesh, axis_name: str | tuple[str, ...]) -> "Groups":
        """The groups of a collective over one mesh axis, or several together."""
        names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
        for name in names:
            if not isinstance(mesh, Mesh) or name not in mesh.axis_names:
                raise ValueError(f"mesh must have the axis {name!r}, got {mesh!r}")
        sizes = {str(name): mesh.shape[name] for name in mesh.axis_names}
        return _along(sizes, [str(name) for name in names])


def parse_groups(attributes: str) -> Groups:
    """The groups of an instruction with these attributes, in any of XLA's notations."""
    if found := _LISTS.search(attributes):
        rows = re.findall(r"\{([\d,]*)\}", found[1])
        return _groups([_integers(row) for row in rows])
    if found := _IOTA.search(attributes):
        shape = _integers(found[3])
        ids = np.arange(math.prod(shape)).reshape(shape)
        ids = ids.transpose(_integers(found[4])) if found[4] else ids
        return _groups(ids.reshape(int(found[1]), int(found[2])).tolist())
    if found := _MESH.search(attributes):
        sizes = {k: int(n) for k, n in re.findall(r"'([^']*)'=(\d+)", found[1])}
        return _along(sizes, re.findall(r"'([^']*)'", found[2]))
    if found := _SLICES.search(attributes):
        # Slices; or, of an all-to-all, devices: 100,000 times the slice plus a number.
        among = _integers(re.sub(r"x\{.*", "", found[1]))
        return Groups(len({i // 100_000 or i for i in among}))
    return Groups(None)


def _along(sizes: dict[str, int], names: Sequence[str]) -> Groups:
    ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
    axes = [list(sizes).index(name) for name in names]
    ids = np.moveaxis(ids, axes, range(-len(axes), 0))
    size = math.prod(sizes[name] for name in names)
    return _groups(ids.reshape(-1, size).tolist())


def _groups(rows: list[list[int]]) -> Groups:
    return Groups(len(rows[0]) or None, frozenset(map(frozenset, rows)))


def _integers(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]
