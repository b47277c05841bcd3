"""Reads (off a command line) and prints counts, rates and times."""

import functools
import re
from argparse import ArgumentTypeError

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_COUNTS = _PREFIXES | {"K": 1e3, "B": 1e9}
_RATES = {
    prefix + unit: factor * bits
    for prefix, factor in _PREFIXES.items()
    for unit, bits in (("bit", 1), ("bit/s", 1), ("bps", 1), ("b/s", 1), ("B/s", 8))
}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(\S*)")


def _parse(units: dict[str, float], kind: str, text: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ArgumentTypeError(f"must be {kind}, got {text!r}")
    return float(match[1]) * units[match[2]]


parse_count = functools.partial(_parse, _COUNTS, "a count such as 340M, 2.8B or 110e6")
parse_rate = functools.partial(  # as bits per second
    _parse, _RATES, "a rate such as 10Gbit, 200Mbit/s or 25GB/s"
)
parse_duration = functools.partial(_parse, _TIMES, "a time such as 0.5s, 300ms or 50us")


def parse_share(text: str) -> float:
    """A share such as 5% or 0.05."""
    return _parse({"": 1.0, "%": 0.01}, "a share such as 5% or 0.05", text)


def scaled(value: float, unit: str) -> str:
    """Prints ``10 Gbit/s`` or ``340 M parameters``, in three digits."""
    space = " " if len(unit) > len("bit/s") else ""
    for prefix, factor in reversed(_PREFIXES.items()):
        if prefix and value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{space}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Prints ``1.2 s`` or ``30 ms``, in three digits."""
    unit = next((u for u, f in _TIMES.items() if seconds >= 0.9995 * f), "ns")
    return f"{seconds / _TIMES[unit]:.3g} {unit}"
