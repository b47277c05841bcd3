"""Counts the bytes that a compiled program sends, from its collectives."""

import dataclasses
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from slamb_jax._core.axes import AxisName, as_tuple
from slamb_jax._core.checks import check_integer, shown
from slamb_jax.wire.hlo import RING_SHARES, Module, parse_hlo

_LISTS = re.compile(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\s*\{[\d,]*\})*)\}"
)
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}")

#: The devices that take part in a collective together, by their places on the mesh.
#:
#: Of a permute they are the pairs of source and target.
Groups: TypeAlias = frozenset[frozenset[int]]


def divide_mesh(mesh: Mesh, axis_name: AxisName) -> Groups:
    """The groups of a mesh along one of its axes, or several together."""
    for name in as_tuple(axis_name):
        if not isinstance(mesh, Mesh) or name not in mesh.axis_names:
            raise ValueError(f"mesh must have the axis {name!r}, got {mesh!r}")
    return _divide(mesh.shape, as_tuple(axis_name))


def parse_groups(attributes: str) -> Groups | None:
    """The groups in the attributes of an instruction, in any of XLA's notations."""
    if match := _LISTS.search(attributes):
        return _group(map(_integers, re.findall(r"\{[\d,]*\}", match[1])))
    if match := _IOTA.search(attributes):
        shape = _integers(match[2])
        order = _integers(match[3]) if match[3] else None
        ids = np.arange(math.prod(shape)).reshape(shape).transpose(order)
        return _group(ids.reshape(-1, int(match[1])).tolist())
    if match := _MESH.search(attributes):
        sizes = {k: int(n) for k, n in re.findall(r"'([^']*)'=(\d+)", match[1])}
        return _divide(sizes, re.findall(r"'([^']*)'", match[2]))
    return None


def _divide(sizes: Mapping[Hashable, int], names: Sequence[Hashable]) -> Groups:
    """The groups over these axes of a mesh whose axes have these sizes."""
    ids = np.arange(math.prod(sizes.values())).reshape([*sizes.values()])
    axes = [[*sizes].index(name) for name in names]
    ids = np.moveaxis(ids, axes, range(-len(axes), 0))
    return _group(ids.reshape(-1, math.prod(sizes[x] for x in names)).tolist())


def _group(rows: Iterable[Sequence[int]]) -> Groups:
    return frozenset(map(frozenset, rows))


def _integers(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program."""

    kind: str  #: ``"all-reduce"``, ``"all-gather"``, ...
    dtype: str  #: XLA's name of the element type, ``"mixed"`` if they differ
    elements: int  #: elements of each device's payload
    payload_bytes: int  #: bytes of each device's payload
    groups: Groups | None  #: the devices that take part together, if they are known
    conditional: bool  #: whether it is in a branch of a conditional
    #: Runs per call, or None if the number is not known. A branch counts as taken at
    #: every turn of the loops around it.
    times: int | None

    @property
    def group_size(self) -> int | None:
        """Devices that take part together; None if it is not known."""
        return max(map(len, self.groups or ()), default=0) or None

    @property
    def wire_bytes(self) -> float | None:
        """Bytes each device sends, all ``times``, on a ring; None if not known."""
        share = RING_SHARES.get(self.kind)
        if share is None or self.group_size is None or self.times is None:
            return None
        return share(self.group_size) * self.payload_bytes * self.times

    def _row(self) -> tuple[str, ...]:
        runs = "in a branch" if self.conditional else "every call"
        if self.times is None:
            runs += ", times not known"
        elif self.times != 1:
            runs += f", {'at most ' if self.conditional else ''}{self.times} times"
        sent = "not counted" if self.wire_bytes is None else f"{self.wire_bytes:.0f}"
        devices = str(self.group_size or "?")
        return (self.kind, self.dtype, str(self.elements), sent, devices, runs)


@dataclasses.dataclass(frozen=True)
class WireReport:
    """The collectives of a compiled program; prints as a table."""

    collectives: tuple[Collective, ...]

    def bytes_sent(self, *, conditional: bool = False) -> float:
        """Bytes each device sends per call, outside (or only inside) conditionals.

        Inside conditionals the sum is an upper bound: it adds the bytes of all
        branches, of which a call takes one, at every turn of the loops around them.

        Raises:
          ValueError: if one of the collectives cannot be counted.
        """
        chosen = tuple(c for c in self.collectives if c.conditional == conditional)
        if any(c.wire_bytes is None for c in chosen):
            raise ValueError(f"collectives cannot be counted:\n{WireReport(chosen)}")
        return math.fsum(c.wire_bytes or 0 for c in chosen)

    def bytes_over(
        self, mesh: Mesh, axis_name: AxisName, *, conditional: bool = False
    ) -> float:
        """The part of :meth:`bytes_sent` over one mesh axis, or several together.

        Raises:
          ValueError: for an axis that the mesh does not have, and if a collective
            cannot be counted.
        """
        groups = divide_mesh(mesh, axis_name)
        # What cannot be counted stays, and bytes_sent refuses it.
        kept = (x for x in self.collectives if x.groups == groups or not x.wire_bytes)
        return WireReport(tuple(kept)).bytes_sent(conditional=conditional)

    def share(self, dense: "WireReport", *, every: int = 1) -> float:
        """Bytes sent per call, over those of another program, the dense step.

        Over a dense step in bfloat16 it is twice that over one in float32. The bytes
        inside conditionals count once in ``every`` calls, H (in a loop of steps,
        turns). Those of ``dense`` do not count.

        Raises:
          ValueError: if a collective cannot be counted, ``dense`` sends nothing, or
            ``every`` is not a positive integer.
        """
        check_integer("every", every, 1)
        if not (whole := dense.bytes_sent()):
            raise ValueError(f"dense must send something in every call, got:\n{dense}")
        return (self.bytes_sent() + self.bytes_sent(conditional=True) / every) / whole

    def __str__(self) -> str:
        if not self.collectives:
            return "nothing is communicated"
        head = ("kind", "dtype", "elements", "bytes sent", "devices", "runs")
        return format_table([head, *(c._row() for c in self.collectives)], str.ljust)


def format_table(
    rows: Sequence[tuple[str, ...]], justify: Callable[[str, int], str]
) -> str:
    """A table as text, whose first column is justified to the left."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ([x.ljust(first), *map(justify, more, widths)] for x, *more in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def wire_report(program: jax.stages.Compiled | jax.stages.Lowered | str) -> WireReport:
    """Lists every collective of a compiled program, from its HLO.

    Bytes sent are per device, by the ring convention: with g devices and a payload of
    B bytes each, an all-reduce sends 2 (g-1)/g B, an all-gather (g-1) B, a
    reduce-scatter or all-to-all (g-1)/g B, a permute B. A collective that cannot be
    counted (of another kind, between TPU slices, or in a loop of unknown length) is
    listed as such.

    Args:
      program: the result of ``lower`` of ``jax.jit`` or ``nnx.jit``, which is then
        compiled; or that of its ``compile``; or the text of an optimized HLO module.

    Raises:
      ValueError: for a program without HLO text, and for text that is not compiled.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices(), "data")
      >>> mean = lambda x: jax.lax.pmean(x, "data")
      >>> mean = jax.shard_map(mean, mesh=mesh, in_specs=P("data"), out_specs=P())
      >>> print(slamb_jax.wire_report(jax.jit(mean).lower(jnp.ones(8000))))
      kind        dtype  elements  bytes sent  devices  runs
      all-reduce  f32    1000      7000        8        every call
    """
    if hasattr(program, "compile"):  # the lowered program of jax.jit, or of nnx.jit
        program = program.compile()
    text = program if isinstance(program, str) else getattr(program, "as_text", str)()
    if not text or "ENTRY" not in text:
        raise ValueError(
            f"program must be compiled, by .compile(), got {shown(program)}"
        )
    module = parse_hlo(text)
    return WireReport(tuple(_walk(module, module.entry)))


def _walk(
    module: Module, name: str, conditional: bool = False, times: int | None = 1
) -> Iterator[Collective]:
    """The collectives of a computation and of all it calls."""
    body = module.computations.get(name, {})
    for x in body.values():
        if kind := x.collective:
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # a TPU's fusion, which keeps a slice of it
            arrays = [a for y in x.operands if y in body for a in body[y].arrays]
            dtypes = {array.dtype for array in arrays}
            yield Collective(
                kind=kind,
                dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
                elements=sum(array.elements for array in arrays),
                payload_bytes=sum(array.bytes for array in arrays),
                groups=parse_groups(x.attributes),
                conditional=conditional,
                times=times,
            )
            continue  # the computation that it calls is the reduction
        inside, runs = conditional or x.opcode == "conditional", times
        if x.opcode == "while":
            trips = x.trip_count
            runs = None if trips is None or times is None else times * trips
        for called in x.called:
            yield from _walk(module, called, inside, runs)
