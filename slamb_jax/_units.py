"""Counts, rates and times as people write them."""

_PREFIXES = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def scaled(value: float, unit: str) -> str:
    """``10 Gbit/s``, ``340 M parameters``: three digits."""
    space = " " if len(unit) > len("bit/s") else ""
    for prefix, factor in reversed(_PREFIXES.items()):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{space}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """``1.2 s``, ``30 ms``: three digits."""
    unit = next((u for u, f in _TIMES.items() if seconds >= 0.9995 * f), "ns")
    return f"{seconds / _TIMES[unit]:.3g} {unit}"
