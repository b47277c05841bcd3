"""Parses the text of a compiled program (HLO): computations and instructions."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

RING_SHARES: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda g: 2 * (g - 1) / g,
    "all-gather": lambda g: g - 1,
    "reduce-scatter": lambda g: (g - 1) / g,
    "all-to-all": lambda g: (g - 1) / g,
    "collective-permute": lambda g: 1,
}
"""Bytes that each of g devices sends on a ring, per byte of its own payload."""
COLLECTIVES = (*RING_SHARES, "collective-broadcast", "ragged-all-to-all")

_COMPUTATION = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+) = (.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAMES = re.compile(r"%?([\w.\-]+)\s*(?:,|$)")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch)_computations?)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_PREDECESSORS = re.compile(r"\bcontrol-predecessors=\{([^}]*)\}")
_BETWEEN_SLICES = re.compile(r'_megascale_transfer_type="(\w+)"')


class Array(NamedTuple):
    """One array of an instruction's shape."""

    dtype: str  # XLA's name
    elements: int

    @property
    def bytes(self) -> int:
        """Its size, packed where an element has less than 8 bits."""
        digits = re.search(r"\d+", self.dtype)
        bits = 8 if self.dtype == "pred" else int(digits[0]) if digits else 0
        return -(-self.elements * bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``%name = shape opcode(operands), attributes``, without the name."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""  # of a constant, its value

    @property
    def arrays(self) -> list[Array]:
        """The arrays of its shape, which may be a nested tuple; tokens are left out."""
        return [
            Array(dtype, math.prod(int(n) for n in dims.split(",") if n))
            for dtype, dims in _SHAPE.findall(self.shape)
            if dtype != "token"
        ]

    @property
    def called(self) -> list[str]:
        """The computations that it runs: its body, its branches, its reduction."""
        if self.opcode.endswith(("-done", "-update")):
            return []  # they name what their start called
        listed = " ".join(_CALLED.findall(self.attributes))
        return re.findall(r"[\w.\-]+", listed)

    @property
    def collective(self) -> str | None:
        """The kind of collective that it is or starts; None: it is not a collective."""
        kind = self.opcode.removesuffix("-start")
        if self.between_slices and (found := _BETWEEN_SLICES.search(self.attributes)):
            kind = found[1].lower().replace("_", "-")
        return kind if kind in COLLECTIVES else None

    @property
    def between_slices(self) -> bool:
        """Whether it hands an array to the runtime that joins TPU slices."""
        return self.opcode == "send" and bool(_BETWEEN_SLICES.search(self.attributes))

    @property
    def predecessors(self) -> list[str]:
        """What must end before it starts: its operands and its control dependencies."""
        control = _PREDECESSORS.search(self.attributes)
        return [*self.operands, *(_NAMES.findall(control[1]) if control else ())]


class Module(NamedTuple):
    """A program: the instructions of each computation, by name."""

    computations: dict[str, dict[str, Instruction]]
    entry: str  # the name of the computation that runs first

    def within(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction, and those of every computation that it calls."""
        yield instruction
        for name in instruction.called:
            for x in self.computations.get(name, {}).values():
                yield from self.within(x)


def parse_hlo(text: str) -> Module:
    """Parses the text of an HLO module."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            current[match[1]] = _instruction(_COMMENT.sub("", match[2]))
    return Module(computations, entry)


def _instruction(text: str) -> Instruction:
    """``shape opcode(operands), attributes``; the shape may be a nested tuple."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    given, opcode = rest[opening + 1 : closing], rest[:opening]
    literal = given if opcode == "constant" else ""
    operands = () if literal else tuple(_NAMES.findall(given))
    return Instruction(shape, opcode, operands, rest[closing + 1 :], literal)


def _closing(text: str, opening: int) -> int:
    """The position of the parenthesis that closes the one at ``opening``."""
    depth = 0
    for i in range(max(opening, 0), len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1
