"""Reads off a compiled program what it sends."""

from slamb_jax.wire.groups import Groups
from slamb_jax.wire.hlo import RING_SHARES, parse_hlo
from slamb_jax.wire.report import Collective, WireReport, wire_report

__all__ = [
    "RING_SHARES",
    "Collective",
    "Groups",
    "WireReport",
    "parse_hlo",
    "wire_report",
]
