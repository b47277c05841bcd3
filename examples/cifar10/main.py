"""ResNet-110 on CIFAR-10, or a small ResNet on handwritten digits.

Run from the root of the repository: ``python -m examples.cifar10.main`` for the digits,
``--config examples/cifar10/configs/slamb.yaml --data-dir DIR`` for CIFAR-10.
BatchNorm's statistics are each worker's own.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import optax

from examples import train
from examples.cifar10 import data
from examples.cifar10.models import ResNet
from examples.common import inputs
from examples.common.inputs import Source
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


def task(o: Config, sources: tuple[Source, Source] | None = None) -> train.Task:
    """Model, loss and schedule, of the images of the options or of these."""
    if sources is None:
        sources = data.load(o.data_dir) if o.data_dir else inputs.digits()
    source, held_out = sources
    model = ResNet(o.depth, o.width)
    per_epoch = train.steps_per_epoch(source, o)
    falls = {round(epoch * per_epoch): 0.1 for epoch in o.milestones}

    def init(key: jax.Array) -> tuple[optax.Params, Any]:
        variables = model.init(key, source[0]["image"][None], train=False)
        return variables["params"], variables["batch_stats"]

    def scores(params: Any, statistics: Any, batch: train.Batch, key: Any) -> Any:
        variables = {"params": params, "batch_stats": statistics}
        image, kept = batch["image"], ["batch_stats"] if key is not None else []
        logits, new = model.apply(variables, image, train=bool(kept), mutable=kept)
        found = train.classified(logits, batch["label"])
        return found, new.get("batch_stats", statistics)

    return train.Task(
        init,
        scores,
        source,
        held_out,
        optax.piecewise_constant_schedule(o.learning_rate, falls),
        round(o.epochs * per_epoch),
        inputs.shifted(4, flip=True) if o.data_dir else inputs.shifted(1, flip=False),
    )


if __name__ == "__main__":
    train.main(Config, task, __doc__)
