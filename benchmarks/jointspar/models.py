"""A ResNet and a transformer whose blocks are the layers that may be skipped."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.byte_lm.model import Active, ByteLM, blocks, next_byte_loss
from slamb_jax.jointspar import train_if


class Residual(nn.Module):
    """Two convolutions, and one in the shortcut where the size changes."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Conv(self.channels, (3, 3), self.stride, use_bias=False)(x)
        y = nn.relu(nn.GroupNorm(4)(y))
        y = nn.GroupNorm(4)(nn.Conv(self.channels, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), self.stride, use_bias=False)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """For small images: each stage of blocks has half the size and twice the width."""

    channels: tuple[int, ...] = (16, 32, 64)
    depth: int = 3  # blocks per stage

    @nn.compact
    def __call__(self, x: jax.Array, active: Active = None) -> jax.Array:
        x = nn.relu(nn.Conv(self.channels[0], (3, 3))(x))
        for i, channels in enumerate(self.channels):
            for j in range(self.depth):
                name = f"Block_{i * self.depth + j}"
                block = Residual(channels, 2 if i and not j else 1, name=name)
                x = train_if(active, name, block)(x)
        return nn.Dense(10)(jnp.mean(x, (1, 2)))


@dataclasses.dataclass(frozen=True)
class Model:
    """Parameters, a batch, and a loss ``loss(params, batch, active)``."""

    name: str
    params: Any
    batch: Any
    loss: Callable[..., jax.Array]

    @property
    def layers(self) -> int:
        """D, by the labels of :func:`examples.byte_lm.model.blocks`."""
        return sum(label is not None for label in blocks(self.params).values())


def resnet(batch: int, seed: int, net: ResNet | None = None) -> Model:
    net, rng = net or ResNet(), np.random.default_rng(seed)
    images = rng.normal(size=(batch, 32, 32, 3)).astype(np.float32)
    labels = rng.integers(0, 10, batch)

    def loss(params: optax.Params, batch: Any, active: Active = None) -> jax.Array:
        logits = net.apply({"params": params}, batch["images"], active)
        losses = optax.softmax_cross_entropy_with_integer_labels
        return jnp.mean(losses(logits, batch["labels"]))

    params = net.init(jax.random.key(seed), images[:1])["params"]
    name = f"ResNet, {batch} images of 32 x 32"
    return Model(name, params, {"images": images, "labels": labels}, loss)


def transformer(batch: int, seed: int) -> Model:
    net = ByteLM(layers=8, width=192, heads=4, context=64)
    text = np.random.default_rng(seed).integers(0, 256, (batch, 65), np.int32)
    params = net.init(jax.random.key(seed), text[:1, :-1])["params"]
    loss = functools.partial(next_byte_loss, net)
    return Model(f"transformer, {batch} sequences of 64", params, text, loss)


MODELS = {"resnet": resnet, "transformer": transformer}
