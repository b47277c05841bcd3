"""Parses the text of a compiled program (HLO)."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

__all__ = ["RING_SHARES", "Instruction", "Module", "parse_hlo"]

#: Bytes that each of g devices sends on a ring, per byte of its own payload.
RING_SHARES: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-gather": lambda g: g - 1,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
}
COLLECTIVES = (*RING_SHARES, "collective-broadcast", "ragged-all-to-all")

_COMPUTATION = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
# ``%name = shape opcode(operands), attributes``. The shape may be a nested tuple, and
# operands may have shapes with parentheses of their own, but no ``), attribute=``.
_INSTRUCTION = re.compile(
    r"(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(?:, ([\w\-]+=.*))?"
)
_COMMENT = re.compile(r"/\*.*?\*/")
_NAMES = re.compile(r"%?([\w.\-]+)\s*(?:,|$)")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch)_computations?)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Array(NamedTuple):
    """One array of an instruction's shape."""

    dtype: str  # XLA's name
    elements: int

    @property
    def bytes(self) -> int:
        """Its size in bytes; elements of less than 8 bits are packed."""
        digits = re.search(r"\d+", self.dtype)
        bits = 8 if self.dtype == "pred" else int(digits[0]) if digits else 0
        return -(-self.elements * bits // 8)


class Instruction(NamedTuple):
    """``%name = shape opcode(operands), attributes``, without the name."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def arrays(self) -> list[Array]:
        """The arrays of the shape, which may be a nested tuple, without its tokens."""
        return [
            Array(dtype, math.prod(int(n) for n in dims.split(",") if n))
            for dtype, dims in _SHAPE.findall(self.shape)
            if dtype != "token"
        ]

    @property
    def called(self) -> list[str]:
        """The computations that the instruction runs: body, branches, reduction."""
        if self.opcode.endswith(("-done", "-update")):
            return []  # their attributes repeat the call of the start
        return re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(self.attributes)))

    @property
    def collective(self) -> str | None:
        """The kind of collective that the instruction is or starts, or None."""
        kind = self.opcode.removesuffix("-start")
        if kind == "send":  # a collective only between TPU slices, by their hosts
            return kind if "_megascale" in self.attributes else None
        return kind if kind in COLLECTIVES else None

    @property
    def trip_count(self) -> int | None:
        """The turns of a ``while`` loop, if the compiler wrote them down.

        Those for CPU and GPU do, of loops that count, as those of ``jax.lax.scan`` do.
        """
        known = _TRIP_COUNT.search(self.attributes)
        return int(known[1]) if known else None


#: The instructions of one computation, by name; the root is the last.
Body: TypeAlias = dict[str, Instruction]


class Module(NamedTuple):
    """A program: its computations by name, and the name of the one that runs first."""

    computations: dict[str, Body]
    entry: str


def parse_hlo(text: str) -> Module:
    """Parses the text of an HLO module."""
    computations: dict[str, Body] = {}
    entry, body = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            body = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.fullmatch(_COMMENT.sub("", line).strip()):
            name, shape, opcode, operands, attributes = match.groups(default="")
            # A constant's is its value.
            names = () if opcode == "constant" else tuple(_NAMES.findall(operands))
            body[name] = Instruction(shape, opcode, names, attributes)
    return Module(computations, entry)
