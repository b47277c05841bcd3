"""Counts what a compiled program sends, from its collectives."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from slamb_jax._checks import check_integer
from slamb_jax.wire.groups import Groups, parse_groups
from slamb_jax.wire.hlo import RING_SHARES, Module, parse_hlo
from slamb_jax.wire.trips import trips_of


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ...
      dtype: XLA's name of the element type, ``"mixed"`` if they differ.
      elements: elements of each device's payload.
      payload_bytes: their bytes.
      groups: the devices that take part together.
      conditional: whether it is in a branch of a conditional.
      times: runs per call; of a branch, the most, as it may be taken at every turn of
        the loops around it; None if that is not known.
      between_slices: whether it uses the data-center network that joins TPU slices;
        its groups are then of slices, each of whose devices sends its share.
    """

    kind: str
    dtype: str
    elements: int
    payload_bytes: int
    groups: Groups
    conditional: bool
    times: int | None
    between_slices: bool = False

    @property
    def group_size(self) -> int | None:
        """Devices (or slices) that take part together; None if it is not known."""
        return self.groups.size

    @property
    def wire_bytes(self) -> float | None:
        """Bytes each device sends, all ``times``, on a ring; None if not known."""
        share = RING_SHARES.get(self.kind)
        if share is None or self.group_size is None or self.times is None:
            return None
        return share(self.group_size) * self.payload_bytes * self.times


@dataclasses.dataclass(frozen=True)
class WireReport:
    """The collectives of a compiled program; prints as a table."""

    collectives: tuple[Collective, ...]

    def bytes_sent(self, *, conditional: bool = False) -> float:
        """Bytes each device sends per call, outside (or only inside) conditionals.

        Inside, the bytes of all branches are added up, and those of a branch in a loop
        at every turn: the most that a call could send, as it takes one branch.

        Raises:
          ValueError: if one of the collectives cannot be counted.
        """
        return _sum(c for c in self.collectives if c.conditional == conditional)

    def bytes_over(
        self,
        mesh: Mesh,
        axis_name: str | tuple[str, ...],
        *,
        conditional: bool = False,
    ) -> float:
        """The part of :meth:`bytes_sent` over one mesh axis, or several together.

        Raises:
          ValueError: for an axis that the mesh does not have, and if a collective
            cannot be counted.
        """
        along = Groups.along(mesh, axis_name).members
        return _sum(
            c
            for c in self.collectives
            if c.conditional == conditional
            and (c.wire_bytes is None or c.groups.members == along)
        )

    def share(self, dense: "WireReport", *, every: int = 1) -> float:
        """Bytes sent per call, over those of another program, the dense step.

        What stands in conditionals counts as sent once in ``every`` calls, H (in a
        loop of steps, turns): here, and not at all in ``dense``.

        Raises:
          ValueError: if a collective cannot be counted, ``dense`` sends nothing, or
            ``every`` is not a positive integer.
        """
        check_integer("every", every, 1)
        if not (whole := dense.bytes_sent()):
            raise ValueError(f"dense must send something in every call, got:\n{dense}")
        averages = self.bytes_sent(conditional=True) / every
        return (self.bytes_sent() + averages) / whole

    def to_json(self) -> list[dict[str, Any]]:
        """A mapping for each collective, of what JSON can hold."""
        return [
            {
                "kind": c.kind,
                "dtype": c.dtype,
                "elements": c.elements,
                "bytes_sent": c.wire_bytes,
                "devices": c.group_size,
                "conditional": c.conditional,
                "times": c.times,
                "between_slices": c.between_slices,
            }
            for c in self.collectives
        ]

    def __str__(self) -> str:
        if not self.collectives:
            return "nothing is communicated"
        head = ("kind", "dtype", "elements", "bytes sent", "devices", "runs")
        rows = [head, *map(_row, self.collectives)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, r, widths)).rstrip() for r in rows)


def _row(c: Collective) -> tuple[str, ...]:
    runs = "in a branch" if c.conditional else "every call"
    if c.times != 1:
        most = "at most " if c.conditional else ""
        runs += f", {most}{c.times} times" if c.times else ", times not known"
    sent = "not counted" if c.wire_bytes is None else f"{c.wire_bytes:.0f}"
    devices = f"{c.group_size or '?'}{' slices' if c.between_slices else ''}"
    return (c.kind, c.dtype, str(c.elements), sent, devices, runs)


def _sum(collectives: Iterable[Collective]) -> float:
    report = WireReport(tuple(collectives))
    if any(c.wire_bytes is None for c in report.collectives):
        raise ValueError(f"there are collectives that cannot be counted:\n{report}")
    return math.fsum(c.wire_bytes or 0 for c in report.collectives)


def wire_report(program: jax.stages.Compiled | jax.stages.Lowered | str) -> WireReport:
    """Lists every collective of a compiled program, from its HLO.

    Bytes sent are per device, by the ring convention: with g devices and a payload of
    B bytes each, an all-reduce sends 2 (g-1)/g B, an all-gather (g-1) B, a
    reduce-scatter or all-to-all (g-1)/g B, a permute B. What cannot be counted (an
    unknown trip count, another kind of collective) is listed as such.

    Args:
      program: what ``jax.jit(f).lower(...)`` returned, or that of ``nnx.jit``, which is
        then compiled; or what its ``compile()`` returned; or the text of an optimized
        HLO module.

    Returns:
      A :class:`WireReport`.

    Raises:
      ValueError: for a program without HLO text.

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
    if hasattr(program, "compile"):  # of jax.jit, or of nnx.jit
        program = program.compile()
    text = program if isinstance(program, str) else getattr(program, "as_text", str)()
    if not text or "ENTRY" not in text:
        raise ValueError(f"program must be compiled or have HLO text, got {program!r}")
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
            operands = [body[operand] for operand in x.operands if operand in body]
            arrays = [array for operand in operands for array in operand.arrays]
            dtypes = {array.dtype for array in arrays}
            yield Collective(
                kind=kind,
                dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
                elements=sum(array.elements for array in arrays),
                payload_bytes=sum(array.bytes for array in arrays),
                groups=parse_groups(x.attributes),
                conditional=conditional,
                times=times,
                between_slices=x.between_slices,
            )
            continue  # what it calls is the reduction
        inside, runs = conditional or x.opcode == "conditional", times
        if x.opcode == "while":
            trips = trips_of(module, body, x)
            runs = None if trips is None or times is None else times * trips
        for called in x.called:
            yield from _walk(module, called, inside, runs)
