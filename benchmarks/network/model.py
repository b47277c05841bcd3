"""The model that every host trains: many parameters and little to compute.

It predicts the next byte of text from the one to four bytes before it: their hashes
choose four rows of an embedding, whose sum goes through one hidden layer. Most
parameters are embeddings, so a dense exchange takes far longer than the compute.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import slamb_jax
from examples.byte_lm import data
from examples.common.optimizers import dense
from examples.common.simulated import AXIS, Method, Task

CONTEXT = 256  # bytes that a worker reads per step
ROWS, WIDTH, HIDDEN = 2**13, 384, 1024


def init(key: jax.Array) -> optax.Params:
    keys = jax.random.split(key, 3)
    shapes = {"embed": (ROWS, WIDTH), "hidden": (WIDTH, HIDDEN), "out": (HIDDEN, 256)}
    params = {
        name: jax.random.normal(key, shape) / shape[-1] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"hidden_bias": jnp.zeros(HIDDEN), "out_bias": jnp.zeros(256)}


def loss(params: optax.Params, text: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats per byte, over text (sequences, CONTEXT + 1)."""
    context, following = text[:, :-1].astype(jnp.uint32), text[:, 1:]
    hashed, x = jnp.zeros_like(context), jnp.zeros((*context.shape, WIDTH))
    for i in range(4):  # longer and longer n-grams; zeros before the text's start
        back = jnp.pad(context, ((0, 0), (i, 0)))[:, : context.shape[1]]
        hashed = (hashed + back + 1) * jnp.uint32(2654435761)
        x = x + params["embed"][hashed >> 19]
    h = jnp.tanh(x @ params["hidden"] + params["hidden_bias"][None, None])
    logits = h @ params["out"] + params["out_bias"][None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def batches(size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    text, _ = data.load(data.standard_library(), CONTEXT)
    return data.batches(text, size, CONTEXT, steps, seed)


TASK = Task(init, loss, batches, held_out=None)


def methods(exchange: slamb_jax.Exchange) -> dict[str, Method]:
    """The optimizers, by the names in the tables."""
    narrow = optax.stateless(mean_in_bfloat16)
    overlap = dataclasses.replace(exchange, overlap=True)
    made = (
        Method(
            "LAMB, float32", lambda rate, _: dense(optax.lamb(rate), AXIS), exchange
        ),
        Method(
            "LAMB, bfloat16",
            lambda rate, _: optax.chain(narrow, optax.lamb(rate)),
            exchange,
        ),
        Method("SLAMB", slamb_jax.slamb, exchange),
        Method("SLAMB, overlap", slamb_jax.slamb, overlap),
    )
    return {method.name: method for method in made}


def mean_in_bfloat16(grads: optax.Updates, _: Any) -> optax.Updates:
    """Over the workers, communicated in 16 bits."""
    flat, unravel = ravel_pytree(grads)
    n = jax.lax.psum(1, AXIS)
    slices = jnp.pad(flat.astype(jnp.bfloat16), (0, -flat.size % n)).reshape(n, -1)
    # As integers: XLA's CPU backend widens a collective of bfloat16.
    bits = jax.lax.bitcast_convert_type(slices, jnp.uint16)
    received = jax.lax.all_to_all(bits, AXIS, split_axis=0, concat_axis=0)
    summed = jax.lax.bitcast_convert_type(received, jnp.bfloat16).astype(jnp.float32)
    rounded = jnp.mean(summed, axis=0).astype(jnp.bfloat16)
    bits = jax.lax.all_gather(jax.lax.bitcast_convert_type(rounded, jnp.uint16), AXIS)
    means = jax.lax.bitcast_convert_type(bits, jnp.bfloat16).reshape(-1)
    return unravel(means[: flat.size].astype(jnp.float32))


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
