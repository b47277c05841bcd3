"""Reads the collectives of a compiled program, and the bytes that they send."""

from slamb_jax.wire.hlo import RING_SHARES, Instruction, Module, parse_hlo
from slamb_jax.wire.report import Collective, WireReport, wire_report

__all__ = [
    "Collective",
    "Instruction",
    "Module",
    "RING_SHARES",
    "WireReport",
    "parse_hlo",
    "wire_report",
]
