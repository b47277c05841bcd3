"""How many kernels a compiled program launches."""

from slamb_jax.wire.hlo import parse_hlo

INLINED = ("calls", "to_apply")  # bodies of fusions and reductions
FREE = {  # instructions that run nothing
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
    "conditional", "while", "call", "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip


def kernels(hlo: str) -> int:
    """Instructions of the compiled text that run, of all branches and loop bodies."""
    computations = parse_hlo(hlo).computations
    inlined = {
        name
        for body in computations.values()
        for x in body.values()
        if any(f"{how}=" in x.attributes for how in INLINED)
        for name in x.called
    }
    return sum(
        x.opcode not in FREE
        for name, body in computations.items()
        if name not in inlined
        for x in body.values()
    )
