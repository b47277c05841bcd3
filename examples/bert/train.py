"""BERT, trained to predict the tokens that were masked."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.bert import data
from examples.bert.models import Bert
from examples.common.inputs import Source
from examples.common.loop import Batch, Task, Variables
from examples.common.optimizers import kernels
from examples.common.options import Options


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """A tiny BERT on the standard library's source; configs/ has the full sizes."""

    vocabulary: int = 4096
    layers: int = 2
    width: int = 128
    heads: int = 4
    length: int = 64
    """Tokens per sequence."""
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and moments are float32."""
    remat: bool = False
    """Compute a layer's activations again in the backward pass, to save memory."""
    files: tuple[Path, ...] = ()
    """Text to train on, files or folders. None: the standard library's source."""
    cache: Path = Path("runs/bert-tokens")
    """Where tokenizer and tokens are kept; all processes must see it."""
    batch_size: int = 8
    steps: int = 500
    warmup_steps: int = 100
    weight_decay: float | None = 0.01
    learning_rate: float = 0.001
    out: Path = Path("runs/bert")


def schedule(config: Config) -> optax.Schedule:
    """Linear warm-up, then the square root of the remaining share of the run."""
    rate, warmup = config.learning_rate, config.warmup_steps
    rise = optax.linear_schedule(0.0, rate, warmup)
    fall = optax.polynomial_schedule(rate, 0.0, 0.5, max(1, config.steps - warmup))
    return optax.join_schedules([rise, fall], [warmup])


def sources(config: Config) -> tuple[Source, Source]:
    """Sequences to train on, and masked ones to evaluate on."""
    return data.load(config.files, config.cache, config.vocabulary, config.length)


def blank(config: Config) -> tuple[Source, Source]:
    """Some empty sequences, without memory."""
    row = np.broadcast_to(np.uint16(0), 1000 * config.length)
    empty = data.Sequences(row, config.length)
    masked = data.Masked(empty, config.vocabulary)
    return masked, masked


def task(config: Config, sources: tuple[Source, Source]) -> Task:
    """Model, loss and schedule."""
    train, held_out = sources
    masked = isinstance(train, data.Masked)
    augment = None if masked else data.masking(config.vocabulary)
    model = Bert(
        config.vocabulary,
        config.layers,
        config.width,
        config.heads,
        config.length,
        config.dropout,
        jnp.dtype(config.dtype),
        config.remat,
    )

    def init(key: jax.Array) -> Variables:
        tokens = jnp.zeros((1, config.length), jnp.int32)
        return model.init(key, tokens, tokens[:, :1], train=False)["params"], {}

    def apply(
        params: optax.Params, batch: Batch, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy and whether the guess was right, by sequence and position."""
        logits: Any = model.apply(
            {"params": params}, batch["tokens"], batch["positions"], **options
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["labels"]
        )
        return losses, (jnp.argmax(logits, -1) == batch["labels"]).astype(jnp.float32)

    def loss(params: optax.Params, kept: Any, batch: Batch, key: jax.Array) -> Any:
        losses, right = apply(params, batch, train=True, rngs={"dropout": key})
        return jnp.mean(losses), (kept, {"accuracy": 100 * jnp.mean(right)})

    def evaluate(params: optax.Params, kept: Any, batch: Batch) -> dict[str, jax.Array]:
        losses, right = apply(params, batch, train=False)
        weight = batch["weight"]
        return {
            "loss": jnp.sum(weight * losses.mean(1)),
            "accuracy": 100 * jnp.sum(weight * right.mean(1)),
            "weight": jnp.sum(weight),
        }

    return Task(
        init=init,
        loss=loss,
        evaluate=evaluate,
        source=train,
        held_out=held_out,
        schedule=schedule(config),
        steps=config.steps,
        augment=augment,
        decay_mask=kernels,
    )
