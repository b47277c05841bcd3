"""Compiles programs as users do: with the optimizations that conftest.py disables."""

from typing import Any

import jax
import optax

import slamb_jax
from tests.workers import stepper

# What JAX_DISABLE_MOST_OPTIMIZATIONS sets, back at XLA's defaults. An option of the
# compiler is part of jax's cache keys; the setting of jax is not.
_XLA_DEFAULTS = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}


def compile_optimized(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles what ``jax.jit(f).lower(...)`` returned, with all optimizations."""
    return lowered.compile(compiler_options=_XLA_DEFAULTS)


def report_of(
    tx: optax.GradientTransformation, params: Any, n: int
) -> slamb_jax.wire.WireReport:
    """What a step of n workers sends, of parameters of these shapes."""
    like = jax.eval_shape(lambda p: (p, tx.init(p), p), params)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), like)
    lowered = stepper(tx, "shard_map", n).lower(*like)
    return slamb_jax.wire_report(compile_optimized(lowered))
