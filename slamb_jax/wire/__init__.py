"""Reads the collectives of a compiled program, and the bytes that they send."""

from slamb_jax.wire.report import Collective as Collective
from slamb_jax.wire.report import WireReport as WireReport
from slamb_jax.wire.report import wire_report as wire_report
