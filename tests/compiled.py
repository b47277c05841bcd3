"""Compiles programs as users do: with the optimizations that conftest.py disables."""

from collections.abc import Callable

import jax
import pytest

# What JAX_DISABLE_MOST_OPTIMIZATIONS sets, back at XLA's defaults. An option of the
# compiler is part of jax's cache keys; the setting of jax is not.
_XLA_DEFAULTS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}


def compile_optimized(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles what ``jax.jit(f).lower(...)`` returned, with all optimizations."""
    return lowered.compile(compiler_options=_XLA_DEFAULTS)


@pytest.fixture
def optimized() -> Callable[[jax.stages.Lowered], jax.stages.Compiled]:
    """:func:`compile_optimized`, as a fixture."""
    return compile_optimized
