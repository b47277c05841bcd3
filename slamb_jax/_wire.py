"""What a compiled program sends, read off its HLO."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from slamb_jax._groups import groups_along, parse_groups
from slamb_jax._hlo import Computations, Instruction, arrays_of, parse_hlo

RING_SHARES: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-gather": lambda g: g - 1,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
}
"""What each of g devices sends, as a share of what it puts in, on a ring."""

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: ``"all-reduce"``, ``"all-gather"``, ...
      dtype: XLA's name of the element type, ``"mixed"`` if they differ.
      elements: elements that each device puts in, once.
      payload_bytes: their bytes.
      group_size: devices that take part together; None if the text does not say.
      groups: the replica groups as XLA writes them.
      conditional: whether it stands in a branch.
      times: how often it runs per call (or per visit of its branch), from the loops
        around it; None if a trip count is not known.
      between_slices: whether it goes over the data-center network that joins TPU
        slices; it then has as many devices as there are slices, each with its share.
    """

    kind: str
    dtype: str
    elements: int
    payload_bytes: int
    group_size: int | None
    groups: str
    conditional: bool
    times: int | None
    between_slices: bool = False

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

        Inside: all branches together, those too of which a call takes one.

        Raises:
          ValueError: if one of them cannot be counted.
        """
        return _bytes([c for c in self.collectives if c.conditional == conditional])

    def bytes_over(
        self, mesh: Mesh, axis_name: Any, *, conditional: bool = False
    ) -> float:
        """Of :meth:`bytes_sent` those over one mesh axis, by the replica groups.

        Args:
          mesh: the mesh that the program runs on.
          axis_name: a mesh axis, or a tuple of those that take part together.
          conditional: those inside conditionals instead of those outside.

        Raises:
          ValueError: for an axis that the mesh has not, and if one cannot be counted.
        """
        along = groups_along(mesh, axis_name)
        chosen = [c for c in self.collectives if c.conditional == conditional]

        def counts(c: Collective) -> bool:  # may count, where that is not known
            return c.wire_bytes is None or parse_groups(c.groups) == along

        return _bytes([c for c in chosen if counts(c)])

    def __str__(self) -> str:
        head = ("kind", "dtype", "elements", "bytes sent", "devices", "runs")
        rows = [head] + [_row(c) for c in self.collectives]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


def _bytes(collectives: list[Collective]) -> float:
    report = WireReport(tuple(collectives))
    if any(c.wire_bytes is None for c in collectives):
        raise ValueError(f"there are collectives that cannot be counted:\n{report}")
    return math.fsum(c.wire_bytes or 0 for c in collectives)


def wire_report(program: jax.stages.Compiled | jax.stages.Lowered | str) -> WireReport:
    """Lists every collective of a compiled program, from its HLO.

    Bytes sent are per device, by the ring convention: with g devices and B bytes put
    in by each, an all-reduce sends 2 (g-1)/g B, an all-gather (g-1) B, a
    reduce-scatter or all-to-all (g-1)/g B, a permute B. What cannot be counted (an
    unknown trip count, another kind of collective) is listed as such.

    Args:
      program: what ``jax.jit(f).lower(...).compile()`` returned; or what ``lower``
        returned, which is then compiled; or the text of an optimized HLO module.

    Returns:
      A :class:`WireReport`.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> mean = jax.shard_map(
      ...     lambda x: jax.lax.pmean(x, "data"),
      ...     mesh=mesh, in_specs=P("data"), out_specs=P(),
      ... )
      >>> x = slamb_jax.replicate(jnp.ones(1000), mesh, "data")
      >>> print(slamb_jax.wire_report(jax.jit(mean).lower(x)))
      kind        dtype  elements  bytes sent  devices  runs
      all-reduce  f32    1000      7000        8        every call
    """
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    text = program if isinstance(program, str) else getattr(program, "as_text", str)()
    if not text or "ENTRY" not in text:
        raise ValueError(f"program must be compiled or have HLO text, got {program!r}")
    computations, entry = parse_hlo(text)
    found = _walk(computations, entry, conditional=False, times=1)
    return WireReport(tuple(found))


def _walk(
    computations: Computations,
    name: str,
    *,
    conditional: bool,
    times: int | None,
) -> Iterator[Collective]:
    """The collectives of a computation and of all it calls."""
    body = computations.get(name, {})
    for instruction in body.values():
        kind = _kind(instruction)
        if kind in _KINDS:
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # a TPU's fusion, of which a slice remains
            yield _collective(kind, instruction, body, conditional, times)
            continue  # what it calls is the reduction
        if instruction.opcode.endswith(("-done", "-update")):
            continue  # names what its start called
        inside, often = conditional, times
        if instruction.opcode == "conditional":
            inside = True
        if instruction.opcode == "while":
            trips = instruction.trips
            often = None if trips is None or times is None else times * trips
        for called in instruction.called:
            yield from _walk(computations, called, conditional=inside, times=often)


def _kind(instruction: Instruction) -> str:
    """The opcode; what is exchanged between TPU slices is a send to the runtime."""
    between = re.search(r'_megascale_transfer_type="(\w+)"', instruction.attributes)
    if instruction.opcode == "send" and between:
        return between[1].lower().replace("_", "-")
    return instruction.opcode.removesuffix("-start")


def _collective(
    kind: str,
    instruction: Instruction,
    body: dict[str, Instruction],
    conditional: bool,
    times: int | None,
) -> Collective:
    operands = [body[name] for name in instruction.operands if name in body]
    arrays = [array for operand in operands for array in arrays_of(operand.shape)]
    dtypes = {array.dtype for array in arrays}
    size, groups = _groups(instruction.attributes)
    if kind == "collective-permute":
        size = size or 2  # each source sends to one target
    return Collective(
        kind=kind,
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        elements=sum(array.elements for array in arrays),
        payload_bytes=sum(array.bytes for array in arrays),
        group_size=size,
        groups=groups,
        conditional=conditional,
        times=times,
        between_slices=instruction.opcode == "send",
    )


def _groups(attributes: str) -> tuple[int | None, str]:
    """The size of the replica groups and their text, in any of XLA's notations."""
    lists = r"replica_groups=(\{\{([\d,]*)\}(?:,\s*\{[\d,]*\})*\})"
    if listed := re.search(lists, attributes):
        return listed[2].count(",") + 1, listed[1]
    iota = r"replica_groups=(\[(\d+),(\d+)\]<=\[[\d,]*\](?:T\([\d,]*\))?)"
    if listed := re.search(iota, attributes):
        return int(listed[3]), listed[1]
    if mesh := re.search(r"replica_groups=(mesh\[(.*?)\]\s*\{(.*?)\})", attributes):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[2]))
        axes = re.findall(r"'([^']*)'", mesh[3])
        return math.prod(int(sizes[axis]) for axis in axes), mesh[1]
    if slices := re.search(r'_megascale_target="?([^"\s]*?)"?,_xla', attributes):
        among = re.sub(r"x\{.*", "", slices[1])  # of all devices: slice and number
        members = {int(m) // 100_000 or int(m) for m in re.findall(r"\d+", among)}
        return len(members), slices[1]
    pairs = re.search(r"source_target_pairs=(\{\{.*?\}\})", attributes)
    return None, pairs[1] if pairs else ""


def _row(c: Collective) -> tuple[str, ...]:
    runs = "in a branch" if c.conditional else "every call"
    if c.times != 1:
        runs += f", {c.times} times" if c.times else ", times not known"
    sent = "not counted" if c.wire_bytes is None else f"{c.wire_bytes:.0f}"
    devices = f"{c.group_size or '?'}{' slices' if c.between_slices else ''}"
    return (c.kind, c.dtype, str(c.elements), sent, devices, runs)
