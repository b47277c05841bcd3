"""Means over the workers: the only algorithm of the library that sends in codes.

In codes, every worker owns a slice of the arrays. It gets the codes of its slice from
all workers (all-to-all), takes the mean, encodes it again and shares it (all-gather).

Where a worker is a group of devices that hold the same arrays, each device exchanges a
slice with its counterparts in the other groups, and the group gathers the results. So
the links between groups carry the arrays once, and not once for every device.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core import axes as _axes
from slamb_jax._core.axes import AxisName, axis_size
from slamb_jax._core.leaves import Leaf
from slamb_jax._core.platform_tiles import flat_size
from slamb_jax._core.rounding import hash_u32, hash_words, round_to, step_seed
from slamb_jax.exchange import collectives as _collectives
from slamb_jax.exchange.codes import Quantizer, cut_among, quantizer_of
from slamb_jax.exchange.settings import Exchange
from slamb_jax.exchange.slices import Place, encode

# Bytes of a long row, and of what its length must be a multiple of: a TPU's all-gather
# sends rows of other lengths twice.
_LONG, _LANES = 2**16, 2**10


class Means(NamedTuple):
    """The means of arrays over the workers; every array has its input's shape.

    Attributes:
      means: in the input's dtype, the same bits on all workers.
      sent: float32; what this worker sent, as the others decode it. None where nothing
        is rounded.
      lost: float32; n times what rounding to codes took of the means that this worker
        owns, and 0 elsewhere. The mean of ``sent`` over the workers is the mean plus
        the mean of ``lost``. None where there are no codes.
    """

    means: list[jax.Array]
    sent: list[jax.Array] | None
    lost: list[jax.Array] | None

    def received_by_others(self, i: int, *, with_lost: bool) -> jax.Array | None:
        """What others got of this array i; ``with_lost``, less what its mean lost."""
        if self.sent is None:
            return None
        if self.lost is None or not with_lost:
            return self.sent[i]
        return self.sent[i] - self.lost[i]


def mean_over_workers(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    exchange: Exchange,
    payload: str | None,
    step: jax.Array,
    *,
    with_errors: bool = False,
) -> Means:
    """Takes the means of arrays in the wire format of a payload.

    Args:
      arrays: this worker's, one for each leaf; any part of the leaf.
      leaves: the leaves that the arrays are of.
      exchange: between whom.
      payload: as in :class:`Exchange`; None sends each array in its own dtype.
      step: seeds the random rounding.
      with_errors: whether to return ``sent`` and ``lost``.
    """
    quantizer = quantizer_of(payload)
    if axis_size(exchange.axis_name) == 1:
        return Means(list(arrays), None, None)
    with_errors = with_errors and payload is not None  # else nothing is rounded
    out = Means(list(arrays), None, None)
    if with_errors:
        wide = [x.astype(jnp.float32) for x in arrays]
        zeros = [jnp.zeros_like(x) for x in wide]
        out = out._replace(sent=wide, lost=None if quantizer is None else zeros)
    # One collective for each wire type, whatever the number of leaves: each collective
    # has a latency, and an all-to-all is never combined with another by XLA.
    for dtype, places in _group_by_wire_type(arrays, leaves, payload, quantizer):
        rounded = [round_to(arrays[i], dtype) for i in places]
        if quantizer is not None:
            alike = [
                leaves[i].parts[0].size if leaves[i].parts else None for i in places
            ]
            found = _mean_in_codes(
                rounded, alike, exchange, quantizer, step, with_errors
            )
        else:
            found = Means(_dense_mean(rounded, exchange), rounded, None)
        for whole, part in zip(out, found, strict=True):
            if whole is None or part is None:
                continue
            for i, x in zip(places, part, strict=True):
                # A mean's type does not vary over the workers; the state's, that it
                # goes into, does.
                varying = _axes.varying_axes(arrays[i])
                whole[i] = _axes.vary_over(x.astype(whole[i].dtype), varying)
    return out


def _group_by_wire_type(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    payload: str | None,
    quantizer: Quantizer | None,
) -> list[tuple[str, list[int]]]:
    """The wire dtype of arrays that may be sent together, and their places.

    Arrays that differ between the shards of a worker share neither a scale nor a type
    with arrays that do not.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, (x, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        dtype = "float32" if quantizer is not None else payload or x.dtype.name
        varying = sorted(map(str, _axes.varying_axes(x)))
        if x.size:
            kinds.setdefault((dtype, leaf.sharded, *varying), []).append(i)
    return [(str(kind[0]), kinds[kind]) for kind in sorted(kinds, key=repr)]


def _dense_mean(arrays: list[jax.Array], exchange: Exchange) -> list[jax.Array]:
    """The mean in the dtype of the arrays, which is the same for all."""
    group = exchange.local_axis_name
    if group is None:
        return _collectives.pmean(arrays, exchange.axis_name)
    # Each device of a group sends a part: the slow links carry the arrays once, and not
    # once for every device.
    flat = _collectives.ravel(arrays)
    slices = jnp.pad(flat, (0, -flat.size % axis_size(group)))
    mine, device = _own_slice(slices.reshape(axis_size(group), -1), group)
    (mean,) = _collectives.pmean([mine], exchange.axis_name)
    whole = _gather_group(mean, device, group, like=flat)[: flat.size]
    return _collectives.unravel(whole, arrays)


def _mean_in_codes(
    arrays: list[jax.Array],
    alike: list[int | None],
    exchange: Exchange,
    quantizer: Quantizer,
    step: jax.Array,
    with_errors: bool,
) -> Means:
    """The mean of float32 arrays in codes, to the owner of each slice and back."""
    axis_name, group = exchange.axis_name, exchange.local_axis_name
    n, width, like = axis_size(axis_name), axis_size(group), arrays[0]
    device = jnp.int32(0) if group is None else _axes.worker_index(group)
    place = Place(n, width, _axes.worker_index(axis_name), device)
    # All workers round with bits of their own, or their errors would add up in the mean
    # in place of cancelling.
    seed = step_seed(step, 0, 0x5A17)
    sizes = [flat_size(x.shape) for x in arrays]
    cuts = cut_among(sizes, quantizer, n * width, alike)
    parts = []
    for number, cut in enumerate(cuts):
        of_cut = [arrays[i] for i in cut.members]
        seed_of_cut = hash_u32(seed, hash_words(number))
        parts.append(encode(cut, of_cut, quantizer, place, seed_of_cut))

    def of_group(x: jax.Array) -> jax.Array:
        return _gather_group(x, device, group, like=like)

    def to_owners(codes: jax.Array) -> jax.Array:
        return _collectives.all_to_all(_own_slice(codes, group)[0], axis_name)

    def to_all(codes: jax.Array) -> jax.Array:
        shared = of_group(_collectives.all_gather(codes, axis_name))
        return shared.reshape(width, n, -1)

    def in_order(columns: list[list[jax.Array]]) -> list[jax.Array]:
        out = list(arrays)
        for cut, column in zip(cuts, columns, strict=True):
            for i, x in zip(cut.members, column, strict=True):
                out[i] = x
        return out

    received = send_concatenated([part.codes for part in parts], to_owners)
    means = [part.mean(x) for part, x in zip(parts, received, strict=True)]
    codes = [part.encode_mean(x) for part, x in zip(parts, means, strict=True)]
    shared = send_concatenated(codes, to_all)
    found = [part.decode_means(x) for part, x in zip(parts, shared, strict=True)]
    sent = lost = None
    if with_errors:
        sent = in_order([part.sent() for part in parts])
        # The owner alone knows what the second rounding took. It counts n times, since
        # the owner is one of the n workers whose momenta are averaged next time.
        errors = []
        for part, mean, code in zip(parts, means, codes, strict=True):
            error = np.float32(n) * (mean - part.decode_slice(code))
            errors.append(part.mine(of_group(error).reshape(width, *mean.shape)))
        lost = in_order(errors)
    return Means(in_order(found), sent, lost)


def send_concatenated(
    codes: list[jax.Array], send: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Sends the codes of several parts in one collective."""
    ends = np.cumsum([x.shape[-1] for x in codes])
    rest = -ends[-1] % _LANES if ends[-1] >= _LONG else 0
    padded = [*codes, jnp.zeros((*codes[0].shape[:-1], rest), jnp.uint8)]
    return jnp.split(send(jnp.concatenate(padded, -1)), ends, axis=-1)[:-1]


def _own_slice(
    slices: jax.Array, group: AxisName | None
) -> tuple[jax.Array, jax.Array]:
    """The slice that this device of its group exchanges, and the device's number."""
    if group is None or axis_size(group) == 1:
        return slices[0], jnp.int32(0)
    device = _axes.worker_index(group)
    return lax.dynamic_index_in_dim(slices, device, keepdims=False), device


def _gather_group(
    x: jax.Array, device: jax.Array, group: AxisName | None, like: jax.Array
) -> jax.Array:
    """The slices of all devices of the group, flat, typed as ``like``."""
    if group is None or axis_size(group) == 1:
        return x.reshape(-1)
    if _axes.tracked_axes(group) <= _axes.varying_axes(like):
        return _collectives.all_gather(x, group).reshape(-1)
    return _collectives.all_gather_invariant(x, device, group).reshape(-1)
