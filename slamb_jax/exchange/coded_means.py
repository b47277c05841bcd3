"""Means over the workers in codes: to the owner of each slice, and back to all."""

from collections.abc import Sequence
from typing import Any, NamedTuple

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
    sizes = [x.shape[-1] for x in slices]
    me, like = worker_index(axis_name), flats[0]
    of_step = step_seed(step, quantizer.seed, 0x5A17)

    def encoded(
        quantizer: Quantizer, xs: Sequence[jax.Array], stage: int, place: jax.Array
    ) -> jax.Array:
        device = (me * jnp.int32(width) + place).astype(jnp.uint32)
        seed = hash_u32(device, of_step)
        codes = [
            quantizer.encode(x, hash_u32(seed, hash_words(stage + 2 * i)))
            for i, x in enumerate(xs)
        ]
        return jnp.concatenate(codes, axis=-1)

    sent = server_error = None
    own_rows: list[Any] = [None] * len(flats)
    is_me = (jnp.arange(n, dtype=jnp.int32) == me)[None, :, None]
    places = [own_slice(x, group) for x in slices]
    mine, place = [x for x, _ in places], places[0][1]
    if with_errors:
        of_group = jax.vmap(lambda xs, place: encoded(quantizer, xs, 0, place))(
            slices, jnp.arange(width, dtype=jnp.int32)
        )
        sent = [
            jnp.where(is_me, x, y).reshape(-1)[: flat.size]
            for x, y, flat in zip(
                slices, _decoded(quantizer, of_group, sizes), flats, strict=True
            )
        ]
        codes, _ = own_slice(of_group, group)
        # A worker's part of the means that it takes itself need not be rounded.
        own_rows = [(me, lax.dynamic_index_in_dim(x, me, keepdims=False)) for x in mine]
    else:
        codes = encoded(quantizer, mine, 0, place)
    codes = collectives.all_to_all(codes, axis_name)
    means = [
        _mean_of_rows(quantizer, part, size, row)
        for part, size, row in zip(
            _cut(quantizer, codes, sizes), sizes, own_rows, strict=True
        )
    ]
    back = quantizer.for_means
    mean_codes = encoded(back, means, 1, place)
    shared = collectives.all_gather(mean_codes, axis_name)
    shared = gathered(shared, place, group, like=like).reshape(width, n, -1)
    if with_errors:
        server_error = []
        rounded = _decoded(back, mean_codes, sizes)
        for mean, known, flat in zip(means, rounded, flats, strict=True):
            lost = gathered(np.float32(n) * (mean - known), place, group, like=like)
            lost = jnp.where(is_me, lost.reshape(width, 1, -1), jnp.float32(0))
            server_error.append(lost.reshape(-1)[: flat.size])
    all_means = [
        x.reshape(-1)[: flat.size]
        for x, flat in zip(_decoded(back, shared, sizes), flats, strict=True)
    ]
    return CodedMeans(all_means, sent, server_error)


def _cut(
    quantizer: Quantizer, codes: jax.Array, sizes: Sequence[int]
) -> list[jax.Array]:
    """The codes of each array, of those of arrays of these sizes one after another."""
    ends = np.cumsum([quantizer.nbytes(size) for size in sizes])
    return jnp.split(codes, ends[:-1], axis=-1)


def _decoded(
    quantizer: Quantizer, codes: jax.Array, sizes: Sequence[int]
) -> list[jax.Array]:
    parts = _cut(quantizer, codes, sizes)
    return [quantizer.decode(x, size) for x, size in zip(parts, sizes, strict=True)]


def _mean_of_rows(
    quantizer: Quantizer,
    codes: jax.Array,
    size: int,
    own_row: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """The mean of the workers' rows; ``own_row`` is an index and its exact row.

    On a CPU in a loop: to decode all rows and sum columns takes it six times as long.
    """
    n = len(codes)

    def decoded(codes: jax.Array, is_own: Any) -> jax.Array:
        x = quantizer.decode(codes, size)
        return x if own_row is None else jnp.where(is_own, own_row[1], x)

    def in_a_loop(codes: jax.Array) -> jax.Array:
        def row(i: Any) -> jax.Array:
            code = lax.dynamic_index_in_dim(codes, i, keepdims=False)
            return decoded(code, own_row is not None and i == own_row[0])

        return lax.fori_loop(1, n, lambda i, total: total + row(i), row(0))

    def at_once(codes: jax.Array) -> jax.Array:
        rows = jnp.arange(n, dtype=jnp.int32)[:, None]
        return jnp.sum(decoded(codes, own_row is not None and rows == own_row[0]), 0)

    total = lax.platform_dependent(codes, cpu=in_a_loop, default=at_once)
    return total / np.float32(n)
