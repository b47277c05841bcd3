"""Workers whose parameters are cut over a second mesh axis."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from slamb_jax import Leaf, Strided
from tests.workers import AXIS, P

N, CUT = 4, 2
OLD = not hasattr(jax.lax, "pcast")  # jax 0.7: only axes that are manual
auto = pytest.mark.skipif(OLD, reason="needs a jax newer than 0.7")


def mesh_4x2():
    return Mesh(np.array(jax.devices()[: N * CUT]).reshape(N, CUT), (AXIS, "model"))


@dataclasses.dataclass(frozen=True)
class Tiled:
    """On whole leaves, the masks that a selection has on the shards of each."""

    inner: Strided
    specs: tuple  # of the leaves, in order
    total: int  # elements of one device's shards

    def _of_shard(self, leaf):
        spec = self.specs[leaf.index] or P()
        cuts = [CUT if "model" in (e or ()) else 1 for e in spec]
        cuts += [1] * (len(leaf.shape) - len(cuts))
        shape = tuple(n // c for n, c in zip(leaf.shape, cuts, strict=True))
        parts = int(np.prod(cuts))
        shard = Leaf(leaf.index, 0, shape, self.total, leaf.stacked, parts)
        return shard, cuts

    def whole(self, leaf):
        return self.inner.whole(self._of_shard(leaf)[0])

    def width(self, leaf):
        return 1

    def age(self, step, leaf):
        shard, cuts = self._of_shard(leaf)
        age = self.inner.age(step, shard)
        age = jnp.repeat(age, self.inner.width(shard), 0).reshape(shard.shape)
        return jnp.tile(age, cuts).reshape(-1, 1)

    def rows(self, step, leaf):
        shard, _ = self._of_shard(leaf)
        slots = -(-shard.size // self.inner.turns) + 128
        most = slots * (leaf.size // shard.size)
        sent = self.age(step, leaf)[:, 0] == 0
        return jnp.nonzero(sent, size=most, fill_value=leaf.size)[0].astype(jnp.int32)
