"""BERT pre-training: masked-language modelling on text of yours.

Run from the root of the repository: ``python -m examples.bert.main`` for a tiny model
on the standard library's source, ``--config examples/bert/configs/large.yaml --files
DIR`` for phase 1 of BERT-Large.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from examples import train
from examples.bert import data
from examples.bert.models import Bert
from examples.common.inputs import Source
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


def schedule(o: Config) -> optax.Schedule:
    """Linear warm-up, then the square root of the remaining share of the run."""
    rise = optax.linear_schedule(0.0, o.learning_rate, o.warmup_steps)
    left = max(1, o.steps - o.warmup_steps)
    fall = optax.polynomial_schedule(o.learning_rate, 0.0, 0.5, left)
    return optax.join_schedules([rise, fall], [o.warmup_steps])


def task(o: Config, sources: tuple[Source, Source] | None = None) -> train.Task:
    """Model, loss and schedule, of the files' sequences or of these."""
    augment = None if sources else data.masking(o.vocabulary)
    source, held_out = sources or data.load(o.files, o.cache, o.vocabulary, o.length)
    sizes = o.vocabulary, o.layers, o.width, o.heads, o.length, o.dropout
    model = Bert(*sizes, jnp.dtype(o.dtype), o.remat)

    def init(key: jax.Array) -> tuple[optax.Params, Any]:
        tokens = jnp.zeros((1, o.length), jnp.int32)
        return model.init(key, tokens, tokens[:, :1], train=False)["params"], {}

    def scores(params: Any, statistics: Any, batch: train.Batch, key: Any) -> Any:
        """Means over the positions of each sequence."""
        rngs = None if key is None else {"dropout": key}
        inputs = batch["tokens"], batch["positions"]
        train = key is not None
        logits: Any = model.apply({"params": params}, *inputs, train=train, rngs=rngs)
        labels = batch["labels"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        is_right = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
        found = {"loss": losses.mean(1), "accuracy": 100 * is_right.mean(1)}
        return found, statistics

    return train.Task(
        init, scores, source, held_out, schedule(o), o.steps, augment, kernels
    )


if __name__ == "__main__":
    train.main(Config, task, __doc__)
