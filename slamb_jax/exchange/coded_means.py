"""Means over the workers in codes: to the owner of each slice, and back to all."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._tree.axes import axis_size, worker_index
from slamb_jax._tree.hashing import hash_u32, hash_words
from slamb_jax._tree.rounding import step_seed
from slamb_jax.exchange import collectives
from slamb_jax.exchange.payloads import Quantizer
from slamb_jax.exchange.settings import Exchange
from slamb_jax.exchange.slices import gathered, own_slice, slices_of

_LARGE = 2**16  # elements: a smaller array is encoded together with others
_LARGE_SLICE = 2**10  # elements of a worker's slice, likewise


class CodedMeans(NamedTuple):
    """Result of :func:`means_in_codes`; see ``Exchanged`` of ``means``."""

    means: list[jax.Array]
    sent: list[jax.Array] | None
    server_error: list[jax.Array] | None


def encoded_together(
    arrays: Sequence[jax.Array], exchange: Exchange
) -> list[list[int]]:
    """Which arrays are encoded as one: the small ones; a large one needs no copy.

    Each worker owns a slice of what is encoded, whose blocks are to be full ones.
    """
    workers = axis_size(exchange.axis_name) * axis_size(exchange.local_axis_name)
    large = max(_LARGE, _LARGE_SLICE * workers)
    alone = [[i] for i, x in enumerate(arrays) if x.size >= large]
    small = [i for i, x in enumerate(arrays) if x.size < large]
    return [*alone, small] if small else alone


@dataclasses.dataclass(frozen=True)
class _Codec:
    """Arrays (..., size) of several sizes, as codes one after the other."""

    quantizer: Quantizer
    sizes: tuple[int, ...]
    seed: jax.Array  # of the step
    stage: int  # on the way to the owners, or back

    def encode(self, xs: Sequence[jax.Array], device: jax.Array) -> jax.Array:
        """``device``, a number, draws the random bits."""
        seed = hash_u32(device.astype(jnp.uint32), self.seed)
        codes = [
            self.quantizer.encode(x, hash_u32(seed, hash_words(self.stage + 2 * i)))
            for i, x in enumerate(xs)
        ]
        return jnp.concatenate(codes, axis=-1)

    def split(self, codes: jax.Array) -> list[jax.Array]:
        """The codes of each array."""
        ends = np.cumsum([self.quantizer.nbytes(size) for size in self.sizes])
        return jnp.split(codes, ends[:-1], axis=-1)

    def decode(self, codes: jax.Array) -> list[jax.Array]:
        parts = zip(self.split(codes), self.sizes, strict=True)
        return [self.quantizer.decode(x, size) for x, size in parts]


def means_in_codes(
    flats: Sequence[jax.Array],
    exchange: Exchange,
    quantizer: Quantizer,
    step: jax.Array,
    with_errors: bool,
) -> CodedMeans:
    """Codes go to the owner of each slice, which averages, encodes and shares them."""
    axis_name, group = exchange.axis_name, exchange.local_axis_name
    n, width = axis_size(axis_name), axis_size(group)
    assert axis_name is not None
    slices = [slices_of(flat, width * n).reshape(width, n, -1) for flat in flats]
    sizes, like = tuple(x.shape[-1] for x in slices), flats[0]
    seed = step_seed(step, quantizer.seed, 0x5A17)
    there = _Codec(quantizer, sizes, seed, stage=0)
    back = _Codec(quantizer.for_means, sizes, seed, stage=1)

    me = worker_index(axis_name)
    is_me = (jnp.arange(n, dtype=jnp.int32) == me)[None, :, None]
    mine = [own_slice(x, group)[0] for x in slices]
    place = own_slice(slices[0], group)[1]
    first = me * jnp.int32(width)  # the number of the group's first device

    def flat(xs: Sequence[jax.Array]) -> list[jax.Array]:
        return [x.reshape(-1)[: y.size] for x, y in zip(xs, flats, strict=True)]

    sent = server_error = None
    own_rows: list[jax.Array | None] = [None] * len(flats)
    if with_errors:
        devices = first + jnp.arange(width, dtype=jnp.int32)
        of_group = jax.vmap(there.encode)(slices, devices)
        known = zip(slices, there.decode(of_group), strict=True)
        sent = flat([jnp.where(is_me, x, y) for x, y in known])
        codes = own_slice(of_group, group)[0]
        # A worker's part of the means that it takes itself need not be rounded.
        own_rows = [lax.dynamic_index_in_dim(x, me, keepdims=False) for x in mine]
    else:
        codes = there.encode(mine, first + place)
    parts = there.split(collectives.all_to_all(codes, axis_name))
    means = [
        _mean_of_rows(quantizer, part, size, me, row)
        for part, size, row in zip(parts, sizes, own_rows, strict=True)
    ]
    codes = back.encode(means, first + place)
    shared = gathered(collectives.all_gather(codes, axis_name), place, group, like=like)
    if with_errors:
        server_error = []
        for mean, rounded in zip(means, back.decode(codes), strict=True):
            lost = gathered(np.float32(n) * (mean - rounded), place, group, like=like)
            lost = lost.reshape(width, 1, -1)
            server_error.append(jnp.where(is_me, lost, jnp.float32(0)))
        server_error = flat(server_error)
    return CodedMeans(
        flat(back.decode(shared.reshape(width, n, -1))), sent, server_error
    )


def _mean_of_rows(
    quantizer: Quantizer,
    codes: jax.Array,
    size: int,
    me: jax.Array,
    own_row: jax.Array | None,
) -> jax.Array:
    """The mean of the workers' rows; ``own_row`` is that of this worker, exact.

    On a CPU in a loop: to decode all rows and sum columns takes it six times as long.
    """
    n = len(codes)

    def decoded(codes: jax.Array, number: jax.Array) -> jax.Array:
        x = quantizer.decode(codes, size)
        return x if own_row is None else jnp.where(number == me, own_row, x)

    def in_a_loop(codes: jax.Array) -> jax.Array:
        def row(i: jax.Array) -> jax.Array:
            return decoded(lax.dynamic_index_in_dim(codes, i, keepdims=False), i)

        return lax.fori_loop(1, n, lambda i, total: total + row(i), row(jnp.int32(0)))

    def at_once(codes: jax.Array) -> jax.Array:
        return jnp.sum(decoded(codes, jnp.arange(n, dtype=jnp.int32)[:, None]), 0)

    total = lax.platform_dependent(codes, cpu=in_a_loop, default=at_once)
    return total / np.float32(n)
