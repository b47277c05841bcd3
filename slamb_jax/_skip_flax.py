"""Flax's two kinds of modules as layers that may be skipped; imported on demand."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from slamb_jax._skip import Flag, floating, is_kept, pulled_back, train_function_if

Flags = tuple[Flag, Flag]


def train_linen_if(flags: Flags, module: nn.Module) -> Callable[..., Any]:
    """A linen module within its parent; statistics are updated, keys are its own."""

    def layer(*inputs: Any, **settings: Any) -> Any:
        if module.is_initializing():
            return module(*inputs, **settings)
        (own, others), join = floating(inputs)

        def call(module: nn.Module, own: Any, others: Any) -> Any:
            return module(*join(own, others), **settings)

        def branching(module: nn.Module, flags: Any, own: Any, others: Any) -> Any:
            return call(module, own, others)

        def forward(module: nn.Module, flags: Any, own: Any, others: Any) -> Any:
            kept = nn.checkpoint(call, policy=is_kept, prevent_cse=False)
            y, vjp = nn.vjp(lambda m, own: kept(m, own, others), module, own)
            return y, (flags, vjp)

        def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
            flags, vjp = residuals
            params, inputs = pulled_back(flags, vjp, cotangent)
            return params, None, inputs, None

        return nn.custom_vjp(branching, forward, backward)(module, flags, own, others)

    return layer


def train_nnx_if(flags: Flags, module: nnx.Module) -> Callable[..., Any]:
    """An nnx module; what it changes of its own state (statistics, keys) is kept."""

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
