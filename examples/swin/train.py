"""A Swin Transformer that classifies images."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from examples.common import images
from examples.common.inputs import Augment, Source
from examples.common.loop import Task, Variables
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


def schedule(config: Config, per_epoch: float) -> optax.Schedule:
    """Linear warm-up, cosine to zero."""
    warmup, steps = (
        round(e * per_epoch) for e in (config.warmup_epochs, config.epochs)
    )
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(steps, warmup + 1)
    )


def sources(config: Config) -> tuple[Source, Source]:
    """The images to train on, and those to test on."""
    if config.data_dir is None:
        if config.image_size != 8:
            raise SystemExit(
                f"--image-size: the digits have 8 x 8 pixels, got {config.image_size}; "
                "images of your own need --data-dir"
            )
        return images.digits()
    return data.load(config.data_dir, config.image_size, config.classes)


def blank(config: Config) -> tuple[Source, Source]:
    """As many black images as ImageNet has, without memory."""
    shape = (config.image_size, config.image_size, 3)
    return images.blank(1_281_167, shape), images.blank(50_000, shape)


def task(config: Config, sources: tuple[Source, Source]) -> Task:
    """Model, loss and schedule."""
    model = Swin(
        config.classes,
        config.patch,
        config.window,
        config.width,
        config.depths,
        config.heads,
        config.drop_path,
        jnp.dtype(config.dtype),
    )
    augment: Augment = images.shifted(1, flip=False)
    if isinstance(sources[0], data.ImageFolder):
        augment = data.Augmenting(config.image_size)
    channels = 1 if config.data_dir is None and config.image_size == 8 else 3
    per_epoch = images.steps_per_epoch(sources[0], config)

    def init(key: jax.Array) -> Variables:
        image = jnp.zeros((1, config.image_size, config.image_size, channels))
        return model.init(key, image, train=False)["params"], {}

    def apply(params: Any, kept: Any, image: jax.Array, key: Any) -> Any:
        rngs = None if key is None else {"dropout": key}
        train = key is not None
        return model.apply({"params": params}, image, train=train, rngs=rngs), kept

    return images.task(
        init,
        apply,
        sources,
        smoothing=config.label_smoothing,
        schedule=schedule(config, per_epoch),
        steps=round(config.epochs * per_epoch),
        augment=augment,
        decay_mask=kernels,
    )
