"""The machine of a measurement, for the foot of a table."""

import os
import platform
from pathlib import Path

import jax


def hardware(device: jax.Device) -> str:
    """The accelerator's or processor's name, cores, and the versions that matter."""
    name = device.device_kind
    if device.platform == "cpu":
        name = f"{processor()}, {os.cpu_count()} cores"
    return f"{name}; Python {platform.python_version()}, jax {jax.__version__}"


def processor() -> str:
    """The processor's name, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()
