"""Residual networks for small images, as He et al. (2015) made them for CIFAR-10."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

INIT = nn.initializers.he_normal()


class Block(nn.Module):
    """Two convolutions; the shortcut has no parameters."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        convolution = functools.partial(
            nn.Conv, self.channels, (3, 3), use_bias=False, kernel_init=INIT
        )
        norm = functools.partial(nn.BatchNorm, not train, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(convolution(strides=strides)(x)))
        y = norm()(convolution()(y))
        x = x[:, :: self.stride, :: self.stride]
        wider = self.channels - x.shape[-1]
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (wider // 2, wider - wider // 2)))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """ResNet of 6 n + 2 layers: three stages of n blocks, each twice as wide."""

    depth: int
    width: int = 16
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if self.depth < 8 or self.depth % 6 != 2:
            raise ValueError(f"depth must be 6 n + 2, n >= 1, got {self.depth}")
        x = nn.Conv(self.width, (3, 3), use_bias=False, kernel_init=INIT)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for stage in range(3):
            for block in range(self.depth // 6):
                stride = 2 if stage and not block else 1
                x = Block(self.width * 2**stage, stride)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))
