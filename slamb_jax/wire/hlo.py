"""Parses the text of a compiled program (HLO): instructions, and the turns of loops."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
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
# ``%name = shape opcode(operands), attributes``; the shape may be a nested tuple.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAMES = re.compile(r"%?([\w.\-]+)\s*(?:,|$)")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch)_computations?)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_BETWEEN_SLICES = re.compile(r'_megascale_transfer_type="(\w+)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LOOP = re.compile(r"\b(condition|body)=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_COPIES = ("copy", "copy-done", "copy-start", "bitcast")


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


@dataclasses.dataclass(frozen=True)
class Instruction:
    """``%name = shape opcode(operands), attributes``, without the name."""

    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""  # the value of a constant

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
        if kind == "send" and (found := _BETWEEN_SLICES.search(self.attributes)):
            kind = found[1].lower().replace("_", "-")
        return kind if kind in COLLECTIVES else None


Body = Mapping[str, Instruction]
"""The instructions of one computation, by name; the root is the last."""


class Module(NamedTuple):
    """A program: its computations by name, and the name of the one that runs first."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    def within(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction, and those of every computation that it calls."""
        yield instruction
        for name in instruction.called:
            for x in self.computations.get(name, {}).values():
                yield from self.within(x)

    def trips(self, loop: Instruction, before: Body) -> int | None:
        """The turns of a ``while`` loop in the computation ``before``, if known.

        The compilers for CPU and GPU write them down. That for TPU does not: there they
        follow from a loop that counts from a constant to a constant in constant steps,
        as the loops of ``jax.lax.scan`` do.
        """
        if known := _TRIP_COUNT.search(loop.attributes):
            return int(known[1])
        try:
            return self._counted(loop, before)
        except (LookupError, ValueError):  # it is not such a loop
            return None

    def _counted(self, loop: Instruction, before: Body) -> int:
        named = dict(_LOOP.findall(loop.attributes))
        tests, turns = (self.computations[named[x]] for x in ("condition", "body"))
        test = _follow(tests, [*tests][-1], "compare")
        place = _carried(tests, test.operands[0])
        carried = _follow(turns, [*turns][-1], "tuple").operands[place]
        added = _follow(turns, carried, "add")
        step = _constant(turns, added.operands[1])
        counts = _carried(turns, added.operands[0]) == place and step > 0
        if not counts or "direction=LT" not in test.attributes:
            raise ValueError("the loop does not count up to a limit")
        begin = _follow(before, loop.operands[0], "tuple").operands[place]
        first, last = _constant(before, begin), _constant(tests, test.operands[1])
        return len(range(first, last, step))


def _follow(body: Body, name: str, opcode: str) -> Instruction:
    """The instruction of that opcode whose result, perhaps copied, has this name."""
    x = body[name]
    while x.opcode in _COPIES:
        x = body[x.operands[0]]
    if x.opcode != opcode:
        raise ValueError(f"{name} must be a {opcode}, got {x}")
    return x


def _carried(body: Body, name: str) -> int:
    """The place of a value in the tuple that a loop carries from turn to turn."""
    x = _follow(body, name, "get-tuple-element")
    _follow(body, x.operands[0], "parameter")
    return int(_INDEX.findall(x.attributes)[0])


def _constant(body: Body, name: str) -> int:
    return int(_follow(body, name, "constant").literal)


def parse_hlo(text: str) -> Module:
    """Parses the text of an HLO module."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(_COMMENT.sub("", line)):
            name, shape, opcode, rest = match.groups()
            end = _closing(rest)
            literal = rest[:end] if opcode == "constant" else ""
            operands = () if literal else tuple(_NAMES.findall(rest[:end]))
            attributes = rest[end + 1 :]
            current[name] = Instruction(shape, opcode, operands, attributes, literal)
    return Module(computations, entry)


def _closing(text: str) -> int:
    """The position of the parenthesis that closes one before the text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return i
    return len(text)
