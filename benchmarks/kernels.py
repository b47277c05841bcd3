"""How many kernels a compiled program launches."""

import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_FREE = {  # instructions that run nothing
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "conditional", "while", "call", "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip


def kernels(hlo: str) -> int:
    """Instructions of the compiled text that run, of all branches and loop bodies."""
    heads = list(_COMPUTATION.finditer(hlo))
    ends = [*(head.start() for head in heads[1:]), len(hlo)]
    bodies = {
        head[1]: hlo[head.end() : end] for head, end in zip(heads, ends, strict=True)
    }
    inlined = set(_CALLED.findall(hlo))  # bodies of fusions and reductions
    return sum(
        match[1] not in _FREE
        for name, body in bodies.items()
        if name not in inlined
        for line in body.splitlines()
        if (match := _INSTRUCTION.match(line))
    )
