"""Flax modules as layers that are trained conditionally; imported on demand."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from slamb_jax.jointspar.branches import (
    Flags,
    Vjp,
    conditional_vjp,
    is_saved,
    merge,
    partition,
    train_function_if,
)


def train_linen_if(flags: Flags, module: nn.Module) -> Callable[..., Any]:
    """A linen module within its parent; statistics are updated, keys are its own."""

    def layer(*inputs: Any, **settings: Any) -> Any:
        if module.is_initializing():
            return module(*inputs, **settings)

        def call(module: nn.Module, inexact: Any, others: Any) -> Any:
            return module(*merge(inexact, others), **settings)

        def forward(module: nn.Module, flags: Flags, inexact: Any, others: Any) -> Any:
            saving = nn.checkpoint(call, policy=is_saved, prevent_cse=False)
            y, vjp = nn.vjp(lambda m, x: saving(m, x, others), module, inexact)
            return y, (flags, vjp)

        def backward(residuals: tuple[Flags, Vjp], cotangent: Any) -> tuple[Any, ...]:
            params, inputs = conditional_vjp(*residuals, cotangent)
            return params, None, inputs, None

        run = nn.custom_vjp(lambda m, _, *x: call(m, *x), forward, backward)
        return run(module, flags, *partition(inputs))

    return layer


def train_nnx_if(flags: Flags, module: nnx.Module) -> Callable[..., Any]:
    """An nnx module; changes of its other state (statistics, keys) are kept."""

    def layer(*inputs: Any, **settings: Any) -> Any:
        parts: Any = nnx.split(module, nnx.Param, ...)
        graph, params, rest = parts

        def call(params: Any, rest: Any, *inputs: Any) -> Any:
            merged = nnx.merge(graph, params, rest, copy=True)
            y = merged(*inputs, **settings)
            return y, nnx.state(merged, nnx.Not(nnx.Param))

        y, rest = train_function_if(
            flags, call, params, (jax.lax.stop_gradient(rest), *inputs)
        )
        nnx.update(module, rest)
        return y

    return layer
