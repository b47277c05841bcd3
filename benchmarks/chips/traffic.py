"""Bytes that the kernels of a compiled program read and write in a chip's memory.

Each kernel's operands and results count once. A part that is sliced or gathered counts
as the part, and a result that is updated in place as the update. Arrays in a TPU's fast
memory do not count. Of a conditional the branch that moves least counts: the average
that is not due. It is a count, and no time follows from it alone: reads from a cache
are counted too.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from slamb_jax.wire.hlo import Instruction, Module, parse_hlo

Body = dict[str, Instruction]
FREE = {  # instructions that move nothing
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "partition-id", "replica-id", "iota", "opt-barrier", "async-done",
    "all-reduce-done", "all-gather-done", "all-to-all-done", "copy-done",
}  # fmt: skip
WITH_OPERANDS = {  # instructions whose shape has their operands, too
    "copy-start", "all-gather-start", "all-to-all-start", "collective-permute-start",
    "async-start",
}  # fmt: skip
# An array in a TPU's fast memory, or a flag.
_ON_CHIP = re.compile(r"\b\w+\[[\d,]*\]\{[^{}]*S\([1-9]\d*\)[^{}]*\}")
PART = {"slice", "dynamic-slice", "gather"}
UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # which operand is the update
RENAMED = {"bitcast", "reshape"}
ELEMENTWISE = RENAMED | {
    "abs", "add", "and", "clamp", "compare", "convert", "copy", "divide", "exponential",
    "maximum", "minimum", "multiply", "negate", "not", "or", "pad", "power", "rsqrt",
    "select", "sqrt", "subtract", "transpose", "xor", "shift-left",
    "shift-right-logical",
}  # fmt: skip


class Traffic(NamedTuple):
    """Bytes moved, kernels, and conditionals that the host must decide."""

    bytes: float
    kernels: int
    conditionals: int


def walk(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """The instruction, and those of every computation that it calls."""
    yield instruction
    for name in instruction.called:
        for x in module.computations.get(name, {}).values():
            yield from walk(module, x)


def traffic(text: str) -> Traffic:
    """Of the text of a scheduled program."""
    module = parse_hlo(text)
    return _sum(module, module.computations[module.entry])


def _sum(module: Module, body: Body) -> Traffic:
    found = [traffic_of(module, x, body) for x in body.values()]
    return Traffic(*(sum(column) for column in zip(*found, strict=True)))


def traffic_of(module: Module, x: Instruction, body: Body) -> Traffic:
    """Of one instruction, with the computations that it calls."""
    if x.opcode in FREE:
        return Traffic(0, 0, 0)
    called = [module.computations[c] for c in x.called if c in module.computations]
    if x.opcode == "conditional":
        least = min((_sum(module, branch) for branch in called), default=(0, 0, 0))
        return Traffic(least[0], least[1], least[2] + 1)
    if x.opcode in ("while", "call", "async-start"):
        inside = [_sum(module, c) for c in called]
        times = x.trip_count or 1
        return Traffic(*(times * sum(column) for column in zip(*inside, strict=True)))
    if x.opcode == "fusion" and called:
        return Traffic(_of_fusion(called[0]), 1, 0)
    written = size(x)
    if x.opcode in PART:
        return Traffic(2 * written, 1, 0)
    if x.opcode == "dynamic-update-slice":
        return Traffic(2 * size(body[x.operands[1]]), 1, 0)
    if x.opcode in WITH_OPERANDS:
        return Traffic(written, 1, 0)
    read = sum(size(body[name]) for name in x.operands if name in body)
    return Traffic(written + read, 1, 0)


def size(x: Instruction) -> int:
    """Bytes of an instruction's arrays in the chip's memory."""
    shape = _ON_CHIP.sub("", x.shape)
    return _bytes(x._replace(shape=shape))


def _bytes(x: Instruction) -> int:
    """Bytes of an instruction's arrays, wherever they are."""
    return sum(array.bytes for array in x.arrays)


def _of_fusion(body: Body) -> float:
    """Bytes that it needs of each of its parameters, and bytes that it writes."""
    needed = _needed(body)
    given = {n: size(x) for n, x in body.items() if x.opcode == "parameter"}
    read = sum(min(full, needed[n]) for n, full in given.items())
    return read + sum(_written(body, x) for x in _results(body))


def _results(body: Body) -> list[Instruction]:
    root = list(body.values())[-1]  # a computation ends with its result
    return [body[n] for n in root.operands] if root.opcode == "tuple" else [root]


def _written(body: Body, x: Instruction) -> float:
    """The result's bytes, or those of the part of it that is updated in place."""
    while x.opcode in RENAMED and body[x.operands[0]].opcode in UPDATES | dict.fromkeys(
        RENAMED
    ):
        x = body[x.operands[0]]
    if x.opcode in UPDATES:
        return size(body[x.operands[UPDATES[x.opcode]]])
    return size(x)


def _needed(body: Body) -> dict[str, float]:
    """Bytes of each value that some result depends on, wherever they are."""
    users: dict[str, list[tuple[str, int]]] = {}
    for name, x in body.items():
        for place, operand in enumerate(x.operands):
            users.setdefault(operand, []).append((name, place))
    last = list(body)[-1]
    needed: dict[str, float] = {}
    for name in reversed(body):  # users follow their operands
        full, part = _bytes(body[name]), 0.0
        for user, place in users.get(name, []):
            x = body[user]
            if x.opcode in PART and place == 0:
                part += needed[user]
            elif x.opcode in UPDATES and place == 0:
                continue  # in place
            elif x.opcode in ELEMENTWISE:
                part += full * needed[user] / (_bytes(x) or 1)
            else:
                part = full
        needed[name] = full if name == last else min(full, part)
    return needed
