"""The optimization track of modded-nanogpt: GPT of 124 M parameters, tokens of FineWeb.

Model, data and batch are those of the public protocol (KellerJordan/modded-nanogpt,
``records/track_3_optimization``): 12 layers of width 768, 1024 tokens of context,
524,288 tokens a step in the order of the files, to a validation loss of 3.28. There it
is run by one worker; here the sequences of a step are split over several.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.common.simulated import Task

FILES = Path("data", "fineweb10B")  # where the protocol's own script puts them
MAGIC, HEADER = 20240520, 256  # of a file: the first of so many int32, then uint16
CONTEXT, VOCABULARY = 1024, 50304  # tokens
SEQUENCES = 512  # of a step, for all workers
VALIDATED = 20 * SEQUENCES
TOGETHER = 8  # sequences whose logits are in memory at once
TARGET, MARGIN = 3.28, 0.004  # reached: (TARGET - mean) sqrt(n) >= MARGIN over n seeds
DTYPE = jnp.bfloat16  # of activations


class Block(nn.Module):
    """Attention with rotary positions and normalized queries and keys, and an MLP."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        *shape, width = x.shape

        def dense(size: int, name: str, std: float) -> nn.Dense:
            init = nn.initializers.normal(std)
            return nn.Dense(size, dtype=DTYPE, kernel_init=init, name=name)

        std = (0.33 / width) ** 0.5
        h = nn.RMSNorm(dtype=DTYPE)(x)
        q, k, v = (
            dense(width, name, std)(h).reshape(*shape, self.heads, -1)
            for name in ("q", "k", "v")
        )
        q, k = (rotated(normalized(y)) for y in (q, k))
        h = jax.nn.dot_product_attention(q, k, v, scale=0.12, is_causal=True)
        x = x + dense(width, "proj", 0.0)(h.reshape(x.shape))
        h = nn.relu(dense(4 * width, "up", std)(nn.RMSNorm(dtype=DTYPE)(x)))
        return x + dense(width, "down", 0.0)(h * h)


class GPT(nn.Module):
    """Logits of the next token, from -15 to 15."""

    layers: int
    width: int
    heads: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(1.0)
        x = nn.Embed(
            self.vocabulary, self.width, embedding_init=init, dtype=DTYPE, name="embed"
        )(tokens)
        x = nn.RMSNorm(dtype=DTYPE)(x)
        for i in range(self.layers):
            x = Block(self.heads, name=f"Block_{i}")(x)
        x = nn.RMSNorm(dtype=DTYPE)(x)
        # Not in a layer: a Muon leaves it to Adam.
        zeros, size = nn.initializers.zeros, self.vocabulary
        head = self.param("head", zeros, (self.width, size))
        bias = self.param("bias", zeros, (size,))
        logits = (x @ head.astype(DTYPE) + bias.astype(DTYPE)).astype(jnp.float32)
        return 15 * logits * jax.lax.rsqrt(logits**2 + 15**2)


def normalized(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    squares = jnp.mean(wide**2, -1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + jnp.finfo(x.dtype).eps)).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions in half of the dimensions of (batch, length, heads, size)."""
    length, quarter = x.shape[1], x.shape[-1] // 4
    speeds = jnp.concatenate(
        [(1 / 1024) ** jnp.linspace(0, 1, quarter), jnp.zeros(quarter)]
    )
    angle = (jnp.arange(length)[:, None] * speeds)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    parts = a * cos + b * sin, b * cos - a * sin
    return jnp.concatenate(parts, -1).astype(x.dtype)


def tokens_of(file: Path) -> np.ndarray:
    """The tokens of a file, read as they are used."""
    head = np.fromfile(file, np.int32, 3)
    if len(head) < 3 or tuple(head[:2]) != (MAGIC, 1):
        raise SystemExit(f"{file} is not a file of tokens: it begins with {head}")
    tokens = np.memmap(file, np.uint16, "r", offset=4 * HEADER)
    if len(tokens) != head[2]:
        raise SystemExit(f"{file} has {len(tokens)} tokens, and says {head[2]}")
    return tokens


def files(kind: str) -> list[Path]:
    found = sorted(FILES.glob(f"fineweb_{kind}_*.bin"))
    if not found:
        raise SystemExit(
            f"There is no fineweb_{kind}_*.bin in {FILES}: put the files of "
            "modded-nanogpt's data/cached_fineweb10B.py there"
        )
    return found


def batches(
    read: Sequence[Path], size: int, steps: int, context: int
) -> Iterator[np.ndarray]:
    """Arrays (size, context + 1), in the order of the files; rows share their ends."""
    made, rows = 0, np.arange(size)[:, None] * context + np.arange(context + 1)
    for tokens in map(tokens_of, read):
        for start in itertools.count(0, size * context):
            if made == steps:
                return
            if start + size * context + 1 >= len(tokens):  # the rest is left, as there
                break
            made += 1
            yield tokens[start + rows].astype(np.int32)
    raise SystemExit(f"{len(read)} files have tokens for {made} of {steps} steps")


def fineweb(
    layers: int = 12, width: int = 768, heads: int = 6, context: int = CONTEXT,
    vocabulary: int = VOCABULARY, validated: int = VALIDATED,
) -> Task:  # fmt: skip
    """The track's task. A seed is of the parameters: the order of the data is fixed."""
    model = GPT(layers, width, heads, vocabulary)
    train = files("train")
    (held_out,) = batches(files("val"), validated, 1, context)

    def loss(params: optax.Params, rows: jax.Array) -> jax.Array:
        @jax.checkpoint  # no logits are kept
        def part(rows: jax.Array) -> jax.Array:
            logits = model.apply({"params": params}, rows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, rows[:, 1:]
            ).mean()

        together = math.gcd(TOGETHER, len(rows))
        return jax.lax.map(part, rows.reshape(-1, together, context + 1)).mean()

    return Task(
        init=lambda key: model.init(key, jnp.zeros((1, context), jnp.int32))["params"],
        loss=loss,
        batches=lambda size, steps, seed: batches(train, size, steps, context),
        held_out=held_out,
        unit="nats per token",
    )
