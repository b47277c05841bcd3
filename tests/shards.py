"""Workers whose parameters are sharded over a second mesh axis."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from slamb_jax.exchange.selections import Leaf, Selection, Strided
from tests.workers import AXIS, P

N, SHARDS = 4, 2
OLD = not hasattr(jax.lax, "pcast")  # jax 0.7: only axes that are manual
auto = pytest.mark.skipif(OLD, reason="needs a jax newer than 0.7")


def mesh_4x2() -> Mesh:
    return Mesh(np.array(jax.devices()[: N * SHARDS]).reshape(N, SHARDS),
                (AXIS, "model"))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tiled(Selection):
    """On unsharded leaves, the choice that a selection makes on their shards."""

    inner: Strided
    specs: tuple[Any, ...]  # of the leaves, in order

    def _shard(self, leaf: Leaf) -> tuple[Leaf, list[int]]:
        """The leaf of one shard, and the shards along each dimension."""
        spec = self.specs[leaf.index] or P()
        parts = [SHARDS if "model" in (e or ()) else 1 for e in spec]
        parts += [1] * (len(leaf.shape) - len(parts))
        shape = tuple(n // c for n, c in zip(leaf.shape, parts, strict=True))
        shards = int(np.prod(parts))
        return Leaf(leaf.index, shape, leaf.stacked, shards), parts

    def dense(self, leaf: Leaf) -> bool:
        return self.inner.dense(self._shard(leaf)[0])

    def age(self, step: jax.Array, leaf: Leaf, state: Any = None) -> jax.Array:
        shard, parts = self._shard(leaf)
        age = self.inner.age(step, shard)
        age = jnp.repeat(age, self.inner.block_size(shard), 0).reshape(shard.shape)
        return jnp.tile(age, parts).reshape(-1, 1)

    def blocks(self, step: jax.Array, leaf: Leaf, state: Any = None) -> jax.Array:
        shard, _ = self._shard(leaf)
        slots = -(-shard.size // self.inner.period) + 128
        most = slots * (leaf.size // shard.size)
        chosen = self.age(step, leaf)[:, 0] == 0
        return jnp.nonzero(chosen, size=most, fill_value=leaf.size)[0].astype(jnp.int32)
