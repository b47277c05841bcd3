"""Steps that send nothing, to know how long all the rest of them takes."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import slamb_jax
from examples.common.simulated import Method


def alone(method: Method) -> Method:
    """The same method with every collective's operands kept where they are.

    Packing, casting and unpacking stay in the program and cost as much as ever; an
    optimizer made for a single worker would leave them out.
    """

    def opaque(x: Any, *_: Any, **__: Any) -> Any:
        return jax.lax.optimization_barrier(x)  # the compiler cannot see through it

    def gather(x: jax.Array, axis_name: str, *, tiled: bool = False) -> jax.Array:
        n = jax.lax.psum(1, axis_name)
        return opaque(jnp.tile(x, n) if tiled else jnp.stack([x] * n))

    def make(rate: Any, exchange: slamb_jax.Exchange) -> optax.GradientTransformation:
        tx = method.make(rate, exchange)

        @functools.wraps(tx.update)
        def update(*args: Any) -> Any:
            with mock.patch.multiple(
                jax.lax, pmean=opaque, all_to_all=opaque, all_gather=gather
            ):
                return tx.update(*args)

        return optax.GradientTransformation(tx.init, update)

    return Method(f"{method.name}, alone", make, method.exchange)
