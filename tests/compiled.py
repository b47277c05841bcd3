"""Programs as users compile them, and as other platforms would run them."""

import contextlib
import os
from pathlib import Path
from unittest import mock

from slamb_jax._core import platform as _platform

PLATFORMS = ("cpu", "cuda", "tpu")

# What conftest.py and JAX_DISABLE_MOST_OPTIMIZATIONS set, back at XLA's defaults. An
# option of the compiler is part of jax's cache keys; the setting of jax is not.
_XLA_DEFAULTS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
if "xla_cpu_use_fusion_emitters" in os.environ["XLA_FLAGS"]:  # else it may be unknown
    _XLA_DEFAULTS["xla_cpu_use_fusion_emitters"] = True


def hlo(name):
    """The text of a program in ``tests/hlo``, as a compiler writes it."""
    return (Path(__file__).parent / "hlo" / f"{name}.hlo").read_text()


def compile_optimized(lowered):
    """Compiles with all optimizations, which conftest.py disables elsewhere."""
    return lowered.compile(compiler_options=_XLA_DEFAULTS)


@contextlib.contextmanager
def on_platform(name):
    """What is traced meanwhile has the branches of this platform, and runs here."""

    def choose(*args, default, **branches):
        return branches.get(name, default)(*args)

    with mock.patch.object(_platform.lax, "platform_dependent", choose):
        yield
