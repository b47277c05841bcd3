"""Counts the elements that one device holds, and those that it exchanges per step."""

import collections
import dataclasses
import numbers
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from slamb_jax._checks import check_floating, check_range
from slamb_jax._ex.budget import sent_of
from slamb_jax._layout import Layout, broadcast_specs
from slamb_jax._leaves import Leaf, leaves_of
from slamb_jax.exchange import Exchange

TYPICAL = jax.ShapeDtypeStruct((10_000, 1024), jnp.float32)
"""A matrix of a model that is given as a number of parameters."""


class Elements(NamedTuple):
    """Elements of one device."""

    by_dtype: dict[str, int]  # all parameters
    per_step: tuple[int, ...]  # of each leaf's momentum, exchanged at each step
    averaged: dict[str, tuple[int, ...]]  # of the parameters, at each average

    @property
    def total(self) -> int:
        """Number of parameters."""
        return sum(self.by_dtype.values())


def count_elements(params: float | chex.ArrayTree, exchange: Exchange) -> Elements:
    """Counts the parameters of one device and what it exchanges of the momentum.

    Raises:
      ValueError: unless ``params`` is a number of at least 1, or a tree with elements.
    """
    if isinstance(params, numbers.Real):
        check_range("params", params, 1.0, open_high=True)
        leaf, d = Leaf(0, TYPICAL.shape), int(float(params))
        ((momentum, average),) = sent_of([leaf], exchange)
        sent, share = (-(-d * x // leaf.size) for x in (momentum, average))
        return Elements({"float32": d}, (sent,), {"float32": (share,)})

    check_floating(params, "params")
    shards, layout = shards_of(params, exchange), Layout(None, exchange.stacked)
    leaves = [
        dataclasses.replace(x, shards=whole.layer_size // max(x.layer_size, 1))
        for x, whole in zip(
            leaves_of(shards, layout), leaves_of(params, layout), strict=True
        )
    ]
    by_dtype: collections.Counter[str] = collections.Counter()
    averaged: dict[str, tuple[int, ...]] = {}
    sizes = sent_of(leaves, exchange)
    for (_, of_average), shard in zip(sizes, jax.tree.leaves(shards), strict=True):
        name = shard.dtype.name
        by_dtype[name] += shard.size
        wire = "float32" if exchange.averages_momentum else name
        averaged[wire] = (*averaged.get(wire, ()), of_average)
    if not by_dtype.total():
        raise ValueError(f"params must have elements, got {params!r}")
    return Elements(by_dtype, tuple(sent for sent, _ in sizes), averaged)


def shards_of(params: chex.ArrayTree, exchange: Exchange) -> chex.ArrayTree:
    """Shapes and dtypes of the shard of each leaf that one device holds."""

    def shard(path: Any, x: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if any(spec):
            if not isinstance(sharding, NamedSharding):
                raise ValueError(
                    "params must have a jax.NamedSharding where the exchange has "
                    "param_specs: its mesh gives the sizes of the axes in "
                    f"{spec}, got {x} at params{jax.tree_util.keystr(path)}"
                )
            sharding = NamedSharding(sharding.mesh, spec)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(x.dtype))

    specs = broadcast_specs(exchange.param_specs, params)
    return jax.tree_util.tree_map_with_path(shard, params, specs)
