"""Means over the workers of packed arrays, in the wire format of a payload.

Where a worker is a group of devices that all hold the same arrays, each device
exchanges a slice with its counterparts in the other groups and the group gathers the
results: the links between groups carry the arrays once, not once per device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from slamb_jax import _collectives as collectives
from slamb_jax._axes import axis_size, vary_over, varying_axes
from slamb_jax._ex.coded_means import means_in_codes
from slamb_jax._ex.payloads import Payload, Quantizer, resolve_payload
from slamb_jax._ex.slices import gathered, own_slice, slices_of
from slamb_jax._leaves import Leaf
from slamb_jax._rounding import round_to
from slamb_jax.exchange import Exchange


class Exchanged(NamedTuple):
    """Result of an exchange; every array has its input's shape.

    Attributes:
      means: over the workers, the same bits on all, in the input's dtype.
      sent: float32; what this worker sent as the others decode it; in codes of the
        user's own unchanged where the worker itself takes the mean.
      server_error: float32; n times what rounding took of a mean, on the worker that
        rounded it, 0 elsewhere: with it the mean over the workers is exact to float32
        (but for 16-bit storage). None where nothing is rounded.
    """

    means: list[jax.Array]
    sent: list[jax.Array]
    server_error: list[jax.Array] | None


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
            columns = means_in_codes(rounded, exchange, payload, step, with_errors)
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
    mine, place = own_slice(slices_of(flat, axis_size(group)), group)
    (mean,) = collectives.pmean([mine], exchange.axis_name)
    return gathered(mean, place, group, like=flat)[: flat.size]


def means_over_workers(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    exchange: Exchange,
    payload: Payload,
    step: jax.Array,
) -> list[jax.Array]:
    """Means over the workers, in the wire format of a payload."""
    if payload is None and exchange.local_axis_name is None:
        return collectives.pmean(arrays, exchange.axis_name)
    return exchange_means(arrays, leaves, exchange, payload, step).means
