"""Means over the workers in codes: to the owner of each slice, and back to all."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax import _collectives as collectives
from slamb_jax._axes import axis_size, worker_index
from slamb_jax._ex.coded_parts import Groups, Part, Place, Slices
from slamb_jax._ex.cuts import cut_of
from slamb_jax._ex.flat import flat_size
from slamb_jax._ex.payloads import Quantizer
from slamb_jax._ex.payloads.codes import BlockQuantizer
from slamb_jax._ex.slices import gathered, own_slice
from slamb_jax._rounding import step_seed
from slamb_jax.exchange import Exchange

_LONG, _LANES = 2**16, 2**10  # bytes: of other rows a TPU's all-gather sends twice


class CodedMeans(NamedTuple):
    """Result of :func:`means_in_codes`; see ``Exchanged`` of ``means``."""

    means: list[jax.Array]
    sent: list[jax.Array] | None
    server_error: list[jax.Array] | None


def means_in_codes(
    arrays: Sequence[jax.Array],
    exchange: Exchange,
    quantizer: Quantizer,
    step: jax.Array,
    with_errors: bool,
) -> CodedMeans:
    """Codes go to the owner of each slice, which averages, encodes and shares them."""
    axis_name, group = exchange.axis_name, exchange.local_axis_name
    assert axis_name is not None
    n, width, like = axis_size(axis_name), axis_size(group), arrays[0]
    seed = step_seed(step, quantizer.seed, 0x5A17)
    device = jnp.int32(0) if width == 1 else worker_index(group)
    at = Place(n, width, group, worker_index(axis_name), device, seed)
    numbers, parts = _parts(arrays, quantizer, at, exact=with_errors)

    def back_in_order(columns: list[list[jax.Array]]) -> list[jax.Array]:
        out = list(arrays)
        for places, column in zip(numbers, columns, strict=True):
            for i, x in zip(places, column, strict=True):
                out[i] = x
        return out

    def of_group(x: jax.Array) -> jax.Array:
        return gathered(x, device, group, like=like)

    def to_owners(codes: jax.Array) -> jax.Array:
        return collectives.all_to_all(own_slice(codes, group)[0], axis_name)

    def to_all(codes: jax.Array) -> jax.Array:
        shared = of_group(collectives.all_gather(codes, axis_name))
        return shared.reshape(width, n, -1)

    received = _as_one([part.codes for part in parts], to_owners)
    means = [part.mean(x) for part, x in zip(parts, received, strict=True)]
    codes = [part.encode_mean(x) for part, x in zip(parts, means, strict=True)]
    shared = _as_one(codes, to_all)
    found = [part.decode_means(x) for part, x in zip(parts, shared, strict=True)]
    sent = server_error = None
    if with_errors:
        sent = back_in_order([part.sent() for part in parts])
        lost = []
        for part, mean, code in zip(parts, means, codes, strict=True):
            took = np.float32(n) * (mean - part.decode_mean(code))
            lost.append(part.put(of_group(took).reshape(width, *mean.shape)))
        server_error = back_in_order(lost)
    return CodedMeans(back_in_order(found), sent, server_error)


def _parts(
    arrays: Sequence[jax.Array], quantizer: Quantizer, at: Place, exact: bool
) -> tuple[list[list[int]], list[Part]]:
    """The numbers of the arrays of each part, and the parts."""
    if not isinstance(quantizer, BlockQuantizer):
        return [list(range(len(arrays)))], [Slices(arrays, quantizer, at, exact)]
    sizes = [flat_size(x.shape) for x in arrays]
    kinds = cut_of(sizes, quantizer, at.width * at.n)
    parts: list[Part] = [
        Groups([arrays[i] for i in members], quantizer, at.of_part(i), cut, each)
        for i, (cut, (members, each)) in enumerate(kinds.items())
    ]
    return [members for members, _ in kinds.values()], parts


def _as_one(
    codes: list[jax.Array], share: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Exchanges the codes of several parts together."""
    ends = np.cumsum([x.shape[-1] for x in codes])
    rest = -ends[-1] % _LANES if ends[-1] >= _LONG else 0
    filled = [*codes, jnp.zeros((*codes[0].shape[:-1], rest), jnp.uint8)]
    return jnp.split(share(jnp.concatenate(filled, -1)), ends, axis=-1)[:-1]
