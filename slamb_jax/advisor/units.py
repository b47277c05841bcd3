"""Units of quantities, with their factors. Those that are printed come first."""

from collections.abc import Mapping

_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}
_BITS = {"bit/s": 1, "bit": 1, "bps": 1, "b/s": 1, "B/s": 8}
COUNTS = _PREFIXES | {"K": 1e3, "B": 1e9}
RATES = {p + unit: f * n for p, f in _PREFIXES.items() for unit, n in _BITS.items()}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def scaled(value: float, units: Mapping[str, float]) -> str:
    """Prints ``10 Gbit/s``, ``30 ms`` or ``340 M``, in three digits."""
    unit = next((u for u, f in units.items() if value >= 0.9995 * f), [*units][-1])
    return f"{value / units[unit]:.3g} {unit}".rstrip()
