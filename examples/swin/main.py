"""Swin Transformer on ImageNet, or a small one on handwritten digits.

Run from the root of the repository: ``python -m examples.swin.main`` for the digits,
``--config examples/swin/configs/base.yaml --data-dir DIR`` for ImageNet.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from examples import train
from examples.common import inputs
from examples.common.inputs import Source
from examples.common.optimizers import kernels
from examples.common.options import Options
from examples.swin import data
from examples.swin.models import Swin


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Handwritten digits in small windows; the files in configs/ have ImageNet."""

    data_dir: Path | None = None
    """A folder with train/CLASS/ and val/CLASS/. None: scikit-learn's digits."""
    image_size: int = 8
    classes: int = 10
    patch: int = 2
    window: int = 2
    width: int = 32
    depths: tuple[int, ...] = (2, 2)
    heads: tuple[int, ...] = (2, 4)
    drop_path: float = 0.1
    """Chance that the last block is left out; that of earlier ones grows up to it."""
    label_smoothing: float = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and moments are float32."""
    epochs: float = 40
    warmup_epochs: float = 4
    learning_rate: float = 0.002
    weight_decay: float | None = 0.05
    clip_norm: float | None = 1.0
    out: Path = Path("runs/swin")


def images(o: Config) -> tuple[Source, Source]:
    """The images to train on, and those to test on."""
    if o.data_dir is not None:
        return data.load(o.data_dir, o.image_size, o.classes)
    if o.image_size != 8:
        raise SystemExit(
            f"--image-size: the digits have 8 x 8 pixels, got {o.image_size}; "
            "images of your own need --data-dir"
        )
    return inputs.digits()


def task(o: Config, sources: tuple[Source, Source] | None = None) -> train.Task:
    """Model, loss and schedule, of the images of the options or of these."""
    source, held_out = sources or images(o)
    sizes = o.classes, o.patch, o.window, o.width, o.depths, o.heads, o.drop_path
    model = Swin(*sizes, jnp.dtype(o.dtype))
    augment = inputs.shifted(1, flip=False)
    if o.data_dir is not None:
        augment = data.augmenting(o.image_size)
    channels = 1 if o.data_dir is None and o.image_size == 8 else 3
    per_epoch = train.steps_per_epoch(source, o)
    warmup, steps = (round(e * per_epoch) for e in (o.warmup_epochs, o.epochs))

    def init(key: jax.Array) -> tuple[optax.Params, Any]:
        image = jnp.zeros((1, o.image_size, o.image_size, channels))
        return model.init(key, image, train=False)["params"], {}

    def scores(params: Any, statistics: Any, batch: train.Batch, key: Any) -> Any:
        rngs = None if key is None else {"dropout": key}
        smoothing = 0.0 if key is None else o.label_smoothing
        logits = model.apply(
            {"params": params}, batch["image"], train=key is not None, rngs=rngs
        )
        return train.classified(logits, batch["label"], smoothing), statistics

    return train.Task(
        init,
        scores,
        source,
        held_out,
        # Linear warm-up, cosine to zero.
        optax.warmup_cosine_decay_schedule(
            0.0, o.learning_rate, warmup, max(steps, warmup + 1)
        ),
        steps,
        augment,
        kernels,
    )


if __name__ == "__main__":
    train.main(Config, task, __doc__)
