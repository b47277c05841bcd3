"""Reads the collectives of a compiled program, and the bytes that they send."""

from slamb_jax.wire.report import Collective, WireReport, wire_report

__all__ = ["Collective", "WireReport", "wire_report"]
