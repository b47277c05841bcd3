"""A model of many parameters and little to compute, and steps that send nothing.

It predicts the next byte of text from the one to four bytes before it: their hashes
choose four rows of an embedding, whose sum goes through one hidden layer. Most
parameters are embeddings, so a dense exchange takes far longer than the compute.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import slamb_jax
from benchmarks import rivals
from examples.byte_lm import data
from examples.common.simulated import AXIS, Method, Task

CONTEXT = 256  # bytes that a worker reads per step
ROWS, WIDTH, HIDDEN = 2**13, 384, 1024
PAPER = slamb_jax.Exchange.paper(AXIS, sync_every=10)
METHODS = {
    "LAMB, float32": Method("", lambda rate, _: rivals.dense(optax.lamb(rate), AXIS)),
    "LAMB, bfloat16": Method(
        "", lambda rate, _: rivals.dense_bfloat16(optax.lamb(rate), AXIS)
    ),
    "SLAMB": Method("", slamb_jax.slamb, PAPER),
    "SLAMB, overlap": Method(
        "", slamb_jax.slamb, dataclasses.replace(PAPER, overlap=True)
    ),
}


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


@functools.cache
def task() -> Task:
    """The model on the standard library's source."""
    text, _ = data.load(data.standard_library(), CONTEXT)

    def batches(size: int, steps: int, seed: int) -> Any:
        return data.batches(text, size, CONTEXT, steps, seed)

    return Task(init, loss, batches, held_out=next(batches(1, 1, 0)))


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
