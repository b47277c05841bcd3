"""Compiled programs as text (HLO): their computations and instructions."""

import dataclasses
import math
import re

_BITS = {"pred": 8, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``%name = shape opcode(operands), attributes``, without the name."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def called(self) -> list[str]:
        """The computations that it runs: its body, its branches, its reduction."""
        names = [match[2] for match in _CALLED.finditer(self.attributes)]
        if branches := _BRANCHES.search(self.attributes):
            names += [name.strip().lstrip("%") for name in branches[1].split(",")]
        return names

    @property
    def trips(self) -> int | None:
        """How often a loop runs, where the compiler knows it."""
        trips = _TRIPS.search(self.attributes)
        return int(trips[1]) if trips else None


Computations = dict[str, dict[str, Instruction]]


def parse_hlo(text: str) -> tuple[Computations, str]:
    """The computations of a module, each its instructions by name, and the entry's."""
    computations: Computations = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            current[match[1]] = _instruction(re.sub(r"/\*.*?\*/", "", match[2]))
    return computations, entry


def _instruction(text: str) -> Instruction:
    """``shape opcode(operands), attributes``; the shape may be a nested tuple."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opening = rest.find("(")
    closing = _closing(rest, opening)
    operands = tuple(re.findall(r"%?([\w.\-]+)\s*(?:,|$)", rest[opening + 1 : closing]))
    return Instruction(shape, rest[:opening], operands, rest[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(max(opening, 0), len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text) - 1


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's shape."""

    dtype: str  # XLA's name
    elements: int

    @property
    def bytes(self) -> int:
        return -(-self.elements * _bits(self.dtype) // 8)


def arrays_of(shape: str) -> list[Array]:
    """The arrays of a shape, which may be a nested tuple; tokens are none."""
    return [
        Array(dtype, math.prod(int(n) for n in dims.split(",") if n))
        for dtype, dims in _SHAPE.findall(shape)
        if dtype != "token"
    ]


def _bits(dtype: str) -> int:
    known = _BITS.get(dtype) or re.search(r"\d+", dtype)
    return known if isinstance(known, int) else int(known[0]) if known else 0
