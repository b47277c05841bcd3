"""How often a loop runs its body, where the compiler says it or the loop shows it."""

import re
from collections.abc import Mapping

from slamb_jax.wire.hlo import Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_MOVES = ("copy", "copy-done", "copy-start", "bitcast")

Body = Mapping[str, Instruction]


def trips_of(module: Module, before: Body, loop: Instruction) -> int | None:
    """The turns of a ``while`` among these instructions; None if not known.

    A TPU's compiler does not say them. Then it is a loop that counts from a constant
    up to one in steps of a constant, as those of ``jax.lax.scan`` do, or not known.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    condition, body = _CONDITION.search(loop.attributes), _BODY.search(loop.attributes)
    if not (condition and body and len(loop.operands) == 1):
        return None
    tests, turns = (module.computations.get(x[1], {}) for x in (condition, body))
    test = _last(tests)
    if (
        test is None
        or test.opcode != "compare"
        or "direction=LT" not in test.attributes
    ):
        return None
    place, last = _place(tests, test.operands[0]), _number(tests, test.operands[1])
    first = _number(before, _element(before.get(loop.operands[0]), place))
    step = _step(turns, place)
    if first is None or last is None or not step or step < 0:
        return None
    return max(0, -(-(last - first) // step))


def _step(turns: Body, place: int | None) -> int | None:
    """What a turn adds to an element of what the loop carries."""
    added = _moved(turns, _element(_last(turns), place))
    if added is None or added.opcode != "add":
        return None
    of, by = added.operands
    return _number(turns, by) if _place(turns, of) == place else None


def _last(body: Body) -> Instruction | None:
    """The root, which is printed last."""
    return list(body.values())[-1] if body else None


def _element(x: Instruction | None, place: int | None) -> str:
    """The name of an element of a tuple; nothing without one."""
    if x is None or x.opcode != "tuple" or place is None or place >= len(x.operands):
        return ""
    return x.operands[place]


def _moved(body: Body, name: str) -> Instruction | None:
    """The instruction, behind copies of what it computes."""
    x = body.get(name)
    while x is not None and x.opcode in _MOVES:
        x = body.get(x.operands[0])
    return x


def _place(body: Body, name: str) -> int | None:
    """Which element of what the loop carries it is."""
    x = _moved(body, name)
    if x is None or x.opcode != "get-tuple-element":
        return None
    of, index = body.get(x.operands[0]), _INDEX.search(x.attributes)
    carried = of is not None and of.opcode == "parameter"
    return int(index[1]) if carried and index else None


def _number(body: Body, name: str) -> int | None:
    """The value of an integer constant."""
    x = _moved(body, name)
    if x is None or x.opcode != "constant":
        return None
    return int(x.literal) if re.fullmatch(r"-?\d+", x.literal) else None
