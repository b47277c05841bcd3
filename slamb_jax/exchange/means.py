"""Means over the workers of packed arrays, in the wire format of a payload.

Where a worker is a group of devices that all hold the same arrays, each device
exchanges a slice with its counterparts in the other groups and the group gathers the
results: the links between groups carry the arrays once, not once per device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._tree.axes import (
    AxisName,
    axis_size,
    tracked_axes,
    vary_over,
    varying_axes,
    worker_index,
)
from slamb_jax._tree.hashing import hash_u32, hash_words
from slamb_jax._tree.leaves import Leaf
from slamb_jax._tree.rounding import round_to, step_seed
from slamb_jax.exchange import collectives
from slamb_jax.exchange.payloads import Payload, Quantizer, resolve_payload
from slamb_jax.exchange.settings import Exchange


class Exchanged(NamedTuple):
    """Result of an exchange; every array has its input's shape.

    Attributes:
      means: over the workers, the same bits on all, in the input's dtype.
      sent: float32; what this worker sent as the others decode it; unchanged where
        the worker itself takes the mean.
      server_error: float32; n times what rounding took of a mean, on the worker that
        rounded it, 0 elsewhere: with it the mean over the workers is exact to float32
        (but for 16-bit storage). None where nothing is rounded.
    """

    means: list[jax.Array]
    sent: list[jax.Array]
    server_error: list[jax.Array] | None


class _Flat(NamedTuple):
    """Result of an exchange of one flat array."""

    mean: jax.Array
    sent: jax.Array | None
    server_error: jax.Array | None


def exchange_means(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    exchange: Exchange,
    payload: Payload,
    step: jax.Array,
    *,
    with_errors: bool = False,
) -> Exchanged:
    """Means over the workers; ``with_errors`` asks for what rounding took, too.

    ``arrays`` are parts of these leaves.
    """
    payload = resolve_payload(payload)
    wide = [x.astype(jnp.float32) for x in arrays]
    out = Exchanged(list(arrays), wide, None)
    if axis_size(exchange.axis_name) == 1:
        return out
    if with_errors and isinstance(payload, Quantizer):
        out = out._replace(server_error=[jnp.zeros_like(x) for x in wide])
    # Arrays that differ between the shards of a worker share no scale and no type with
    # those that do not.
    kinds: list[tuple[Any, ...]] = [
        (_wire_dtype(payload, x), leaf.sharded, *sorted(map(str, varying_axes(x))))
        for x, leaf in zip(arrays, leaves, strict=True)
    ]
    for kind in sorted(set(kinds), key=repr):
        places = [i for i, x in enumerate(arrays) if kinds[i] == kind and x.size]
        if not places:
            continue
        like = [arrays[i] for i in places]
        rounded = [round_to(x, kind[0]) for x in like]
        columns: Sequence[Sequence[jax.Array] | None]
        if isinstance(payload, Quantizer):
            found = _mean_in_codes(
                collectives.ravel(rounded), exchange, payload, step, with_errors
            )
            columns = [x if x is None else collectives.unravel(x, like) for x in found]
        elif exchange.local_axis_name is None:
            columns = collectives.pmean(rounded, exchange.axis_name), rounded, None
        else:
            mean = _mean_in_slices(collectives.ravel(rounded), exchange)
            columns = collectives.unravel(mean, like), rounded, None
        for all_of_it, part in zip(out, columns, strict=True):
            if all_of_it is None or part is None:
                continue
            for i, x in zip(places, part, strict=True):
                x = x.astype(all_of_it[i].dtype)
                all_of_it[i] = vary_over(x, varying_axes(arrays[i]))
    return out


def _wire_dtype(payload: Payload, x: jax.Array) -> str:
    if isinstance(payload, Quantizer):
        return "float32"  # what a quantizer encodes
    return payload or x.dtype.name


def _mean_in_slices(flat: jax.Array, exchange: Exchange) -> jax.Array:
    """The mean in the dtype of ``flat``; each device of a group exchanges a slice."""
    group = exchange.local_axis_name
    mine, place = _own_slice(_slices(flat, axis_size(group)), group)
    (mean,) = collectives.pmean([mine], exchange.axis_name)
    return _gathered(mean, place, group, like=flat)[: flat.size]


def _mean_in_codes(
    flat: jax.Array,
    exchange: Exchange,
    quantizer: Quantizer,
    step: jax.Array,
    with_errors: bool,
) -> _Flat:
    """Codes go to the owner of each slice, which averages, encodes and shares them."""
    axis_name, group = exchange.axis_name, exchange.local_axis_name
    n, width = axis_size(axis_name), axis_size(group)
    assert axis_name is not None
    slices = _slices(flat, width * n).reshape(width, n, -1)
    size = slices.shape[-1]
    me = worker_index(axis_name)
    of_step = step_seed(step, quantizer.seed, 0x5A17)

    def seed(stage: int, place: jax.Array) -> jax.Array:
        device = (me * jnp.int32(width) + place).astype(jnp.uint32)
        return hash_u32(hash_u32(device, of_step), hash_words(stage))

    def encoded(slices: jax.Array, place: jax.Array) -> jax.Array:
        return quantizer.encode(slices, seed(0, place))

    sent = server_error = own_row = None
    is_me = (jnp.arange(n, dtype=jnp.int32) == me)[None, :, None]
    mine, place = _own_slice(slices, group)
    if with_errors:
        codes_of_group = jax.vmap(encoded)(slices, jnp.arange(width, dtype=jnp.int32))
        sent = jnp.where(is_me, slices, quantizer.decode(codes_of_group, size))
        sent = sent.reshape(-1)[: flat.size]
        codes, _ = _own_slice(codes_of_group, group)
        # A worker's part of the means that it takes itself need not be rounded.
        own_row = me, lax.dynamic_index_in_dim(mine, me, keepdims=False)
    else:
        codes = encoded(mine, place)
    codes = collectives.all_to_all(codes, axis_name)
    mean = _mean_of_rows(quantizer, codes, size, own_row)
    mean_codes = quantizer.for_means.encode(mean, seed(1, place))
    shared = collectives.all_gather(mean_codes, axis_name)
    shared = _gathered(shared, place, group, like=flat)
    means = quantizer.for_means.decode(shared.reshape(width, n, -1), size).reshape(-1)
    if with_errors:
        lost = np.float32(n) * (mean - quantizer.for_means.decode(mean_codes, size))
        lost = _gathered(lost, place, group, like=flat).reshape(width, 1, size)
        server_error = jnp.where(is_me, lost, jnp.float32(0)).reshape(-1)[: flat.size]
    return _Flat(means[: flat.size], sent, server_error)


def _mean_of_rows(
    quantizer: Quantizer,
    codes: jax.Array,
    size: int,
    own_row: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """The mean of the workers' rows; ``own_row`` is an index and its exact row.

    In a loop: to decode all rows and sum columns takes a CPU six times as long.
    """

    def row(i: Any) -> jax.Array:
        code = lax.dynamic_index_in_dim(codes, i, keepdims=False)
        x = quantizer.decode(code, size)
        return x if own_row is None else jnp.where(i == own_row[0], own_row[1], x)

    total = lax.fori_loop(1, len(codes), lambda i, total: total + row(i), row(0))
    return total / np.float32(len(codes))


def _slices(flat: jax.Array, count: int) -> jax.Array:
    """``flat``, padded with zeros, as (count, -1)."""
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _own_slice(
    slices: jax.Array, group: AxisName | None
) -> tuple[jax.Array, jax.Array]:
    """The slice that this device of its group exchanges, and its index."""
    if group is None or axis_size(group) == 1:
        return slices[0], jnp.int32(0)
    place = worker_index(group)
    return lax.dynamic_index_in_dim(slices, place, keepdims=False), place


def _gathered(
    x: jax.Array, place: jax.Array, group: AxisName | None, like: jax.Array
) -> jax.Array:
    """The slices of all devices of the group, flat, typed as ``like``."""
    if group is None or axis_size(group) == 1:
        return x.reshape(-1)
    if tracked_axes(group) <= varying_axes(like):
        return collectives.all_gather(x, group).reshape(-1)
    return collectives.all_gather_invariant(x, place, group).reshape(-1)
