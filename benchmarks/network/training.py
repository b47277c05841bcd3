"""What every host trains: a model with many parameters and little to compute.

It predicts the next byte of text from the one to four bytes before it: their hashes
choose four rows of an embedding, whose sum goes through one hidden layer. Most
parameters are embeddings, so a dense exchange takes far longer than the compute.
"""

import contextlib
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import slamb_jax
from slamb_jax._collectives import mean_over

AXIS = "data"
CONTEXT = 256  # bytes that a worker reads per step
ROWS, WIDTH, HIDDEN = 2**13, 384, 1024
RATE = 0.01  # of all optimizers


def init(seed: int) -> optax.Params:
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = {"embed": (ROWS, WIDTH), "hidden": (WIDTH, HIDDEN), "out": (HIDDEN, 256)}
    params = {
        name: jax.random.normal(key, shape) / shape[-1] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"hidden_bias": jnp.zeros(HIDDEN), "out_bias": jnp.zeros(256)}


def loss_of(params: optax.Params, text: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats per byte, over text (sequences, CONTEXT + 1)."""
    context, following = text[:, :-1].astype(jnp.uint32), text[:, 1:]
    hashed, x = jnp.zeros_like(context), jnp.zeros((*context.shape, WIDTH))
    for i in range(4):  # longer and longer n-grams; the text's start has none before
        back = jnp.pad(context, ((0, 0), (i, 0)))[:, : context.shape[1]]
        hashed = (hashed + back + 1) * jnp.uint32(2654435761)
        x = x + params["embed"][hashed >> 19]
    h = jnp.tanh(x @ params["hidden"] + params["hidden_bias"][None, None])
    logits = h @ params["out"] + params["out_bias"][None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def dense(dtype: Any) -> optax.GradientTransformation:
    """LAMB on gradients that are averaged over the workers in that dtype."""

    def mean(grads: optax.Updates, _: Any) -> optax.Updates:
        leaves, treedef = jax.tree.flatten(grads)
        means = mean_over([g.astype(dtype) for g in leaves], AXIS)
        return treedef.unflatten([m.astype(jnp.float32) for m in means])

    return optax.chain(optax.stateless(mean), optax.lamb(RATE))


def optimizers(
    compress_ratio: float, sync_every: int
) -> dict[str, optax.GradientTransformation]:
    settings: dict[str, Any] = {
        "axis_name": AXIS, "compress_ratio": compress_ratio, "sync_every": sync_every
    }  # fmt: skip
    return {
        "LAMB, float32": dense(jnp.float32),
        "LAMB, bfloat16": dense(jnp.bfloat16),
        "SLAMB": slamb_jax.slamb(RATE, **settings),
        "SLAMB, overlap": slamb_jax.slamb(RATE, **settings, overlap=True),
    }


def step_with(tx: optax.GradientTransformation, *, alone: bool = False) -> Any:
    """A training step as one worker sees it; ``alone``, with nothing sent."""

    def step(state: tuple, text: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, text)
        with unsent() if alone else contextlib.nullcontext():
            updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def unsent() -> contextlib.AbstractContextManager:
    """While this holds, what is traced keeps its collectives' operands to itself.

    All else stays in the program: what is packed, cast and unpacked for the exchange
    costs as much as ever. (An optimizer for a single worker would leave that out.)
    """

    def opaque(x: Any, *_: Any, **__: Any) -> Any:
        return jax.lax.optimization_barrier(x)  # the compiler cannot see through it

    def gather(x: jax.Array, axis_name: str, *, tiled: bool) -> jax.Array:
        assert tiled
        return opaque(jnp.tile(x, jax.lax.psum(1, axis_name)))

    return mock.patch.multiple(
        jax.lax, pmean=opaque, all_to_all=opaque, all_gather=gather
    )
