"""A ResNet that classifies images; BatchNorm's statistics are each worker's own."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import optax

from examples.cifar10 import data
from examples.cifar10.models import ResNet
from examples.common import images
from examples.common.inputs import Source
from examples.common.loop import Task, Variables
from examples.common.options import Options


@dataclasses.dataclass(frozen=True)
class Config(Options):
    """Handwritten digits and a small ResNet; the files in configs/ have CIFAR-10."""

    depth: int = 8
    """Layers of the ResNet, 6 n + 2."""
    width: int = 16
    """Channels of the first stage."""
    data_dir: Path | None = None
    """Where cifar-10-binary.tar.gz lies. None: scikit-learn's digits."""
    epochs: float = 40
    milestones: tuple[float, ...] = (20, 30)
    """Epochs after which the rate falls to a tenth."""
    learning_rate: float = 0.008
    out: Path = Path("runs/cifar10")


def schedule(config: Config, per_epoch: float) -> optax.Schedule:
    """The rate, a tenth of itself from each milestone on."""
    falls = {round(epoch * per_epoch): 0.1 for epoch in config.milestones}
    return optax.piecewise_constant_schedule(config.learning_rate, falls)


def sources(config: Config) -> tuple[Source, Source]:
    """The images to train on, and those to test on."""
    return data.load(config.data_dir) if config.data_dir else images.digits()


def blank(config: Config) -> tuple[Source, Source]:
    """As many black images as CIFAR-10 has, without memory."""
    return images.blank(50_000, (32, 32, 3)), images.blank(10_000, (32, 32, 3))


def task(config: Config, sources: tuple[Source, Source]) -> Task:
    """Model, loss and schedule."""
    augment = images.shifted(4, flip=True)
    if config.data_dir is None:
        augment = images.shifted(1, flip=False)
    model = ResNet(config.depth, config.width)
    per_epoch = images.steps_per_epoch(sources[0], config)

    def init(key: jax.Array) -> Variables:
        image = sources[0][0]["image"][None]
        variables = model.init(key, image, train=False)
        return variables["params"], variables["batch_stats"]

    def apply(params: Any, kept: Any, image: jax.Array, key: Any) -> Any:
        variables = {"params": params, "batch_stats": kept}
        if key is None:
            return model.apply(variables, image, train=False), kept
        logits, new = model.apply(variables, image, train=True, mutable=["batch_stats"])
        return logits, new["batch_stats"]

    return images.task(
        init,
        apply,
        sources,
        schedule=schedule(config, per_epoch),
        steps=round(config.epochs * per_epoch),
        augment=augment,
    )
