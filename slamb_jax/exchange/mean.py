"""Means over the workers: the only algorithm of the library that sends in codes.

In codes, every worker owns a slice of the arrays; see :func:`_mean_in_codes`. What is
not in codes is averaged by an all-reduce, or in 16 bits by one of ``collectives``.

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
from slamb_jax._core.rounding import hash_u32, hash_words, round_to, step_seed
from slamb_jax.exchange import collectives as _collectives
from slamb_jax.exchange.codecs import BlockCodec, codec_of
from slamb_jax.exchange.settings import Exchange
from slamb_jax.exchange.slices import Part, Place, cut_among


class Means(NamedTuple):
    """The means of arrays over the workers; every array has its input's shape.

    Attributes:
      means: in the input's dtype, the same bits on all workers.
      sent: float32; what this worker sent, as the others decode it. None where nothing
        is rounded.
      lost: float32; n times the quantization error of the means that this worker owns,
        and 0 elsewhere. The mean of ``sent`` over the workers is the mean plus the mean
        of ``lost``. None where there are no codes.
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
    # 1. What is not sent stays as it is: empty arrays, and all of a single worker's.
    codec = codec_of(payload)
    out = Means(list(arrays), None, None)
    if axis_size(exchange.axis_name) == 1:
        return out
    with_errors = with_errors and payload is not None  # else nothing is rounded
    if with_errors:
        wide = [x.astype(jnp.float32) for x in arrays]
        zeros = [jnp.zeros_like(x) for x in wide]
        out = out._replace(sent=wide, lost=None if codec is None else zeros)
    # 2. One collective for each wire type, whatever the number of leaves: each has a
    # latency, and XLA never combines an all-to-all with another.
    for dtype, places in _group_by_wire_type(arrays, leaves, payload, codec):
        rounded = [round_to(arrays[i], dtype) for i in places]
        if codec is None:
            group = Means(_dense_mean(rounded, exchange), rounded, None)
        else:
            # Joined leaves have blocks as each of them has by itself.
            alike = [(*leaves[i].parts, leaves[i])[0].size for i in places]
            group = _mean_in_codes(rounded, alike, exchange, codec, step, with_errors)
        # 3. The results in the places of their arrays.
        for whole, part in zip(out, group, strict=True):
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
    codec: BlockCodec | None,
) -> list[tuple[str, list[int]]]:
    """The wire dtype of arrays that may be sent together, and their places.

    Arrays that differ between the shards of a worker share neither a scale nor a type
    with arrays that do not.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for i, (x, leaf) in enumerate(zip(arrays, leaves, strict=True)):
        dtype = "float32" if codec is not None else payload or x.dtype.name
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
    mine = _own_slice(slices.reshape(axis_size(group), -1), group)
    (mean,) = _collectives.pmean([mine], exchange.axis_name)
    whole = _gather_group(mean, group, like=flat)[: flat.size]
    return _collectives.unravel(whole, arrays)


def _mean_in_codes(
    arrays: list[jax.Array],
    alike: Sequence[int],
    exchange: Exchange,
    codec: BlockCodec,
    step: jax.Array,
    with_errors: bool,
) -> Means:
    """The mean of float32 arrays in codes, to the owner of each slice and back.

    1. Encode: a worker encodes its arrays, and cuts the codes into a slice for each
       owner. Arrays whose groups have another shape are another part.
    2. All-to-all: each owner gets the codes of its slice from all workers.
    3. Average: it decodes and averages them.
    4. Encode again: it encodes the mean.
    5. All-gather: all workers get the codes of all means.
    6. Decode: the same codes, and so the same means to the bit, on all workers.

    ``with_errors`` also says what a worker sent, and what the second encoding lost.
    """
    axis_name, group = exchange.axis_name, exchange.local_axis_name
    n, width = axis_size(axis_name), axis_size(group)
    device = jnp.int32(0) if group is None else _axes.worker_index(group)
    place = Place(n, width, _axes.worker_index(axis_name), device)
    # All workers round with bits of their own, or their errors would add up in the mean
    # in place of cancelling.
    seed = step_seed(step, 0, 0x5A17)
    cuts = cut_among([x.size for x in arrays], codec, n * width, alike)

    def to_owners(codes: jax.Array) -> jax.Array:
        return _collectives.all_to_all(_own_slice(codes, group), axis_name)

    def to_all(codes: jax.Array) -> jax.Array:
        shared = _collectives.all_gather(codes, axis_name)
        return _gather_group(shared, group, like=arrays[0]).reshape(width, n, -1)

    def arrange(columns: list[list[jax.Array]]) -> list[jax.Array]:
        """The arrays of all parts, in their order."""
        out = list(arrays)
        for cut, column in zip(cuts, columns, strict=True):
            for i, x in zip(cut.members, column, strict=True):
                out[i] = x
        return out

    # 1. Encode.
    parts = []
    for number, cut in enumerate(cuts):
        members = [arrays[i] for i in cut.members]
        of_cut = hash_u32(seed, hash_words(number))
        parts.append(Part(cut, members, codec, place, of_cut))
    # 2. All-to-all.
    received = _send_together([part.slices() for part in parts], to_owners)
    # 3. Average.
    means = [part.mean(x) for part, x in zip(parts, received, strict=True)]
    # 4. Encode again.
    codes = [part.encode_slice(x) for part, x in zip(parts, means, strict=True)]
    # 5. All-gather.
    shared = _send_together(codes, to_all)
    # 6. Decode.
    out = arrange(
        [part.decode_slices(x) for part, x in zip(parts, shared, strict=True)]
    )
    if not with_errors:
        return Means(out, None, None)
    # The owner alone knows the error of the second encoding. It counts n times, since
    # the owner is one of the n workers whose momenta are averaged next time.
    errors = []
    for part, mean, code in zip(parts, means, codes, strict=True):
        error = np.float32(n) * (mean - part.decode_slice(code))
        whole = _gather_group(error, group, like=arrays[0])
        errors.append(part.own_arrays(whole.reshape(width, *mean.shape)))
    return Means(out, arrange([part.sent() for part in parts]), arrange(errors))


def _send_together(
    codes: list[jax.Array], send: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    """Sends the codes of several parts in one collective."""
    ends = np.cumsum([x.shape[-1] for x in codes])[:-1]
    return jnp.split(send(jnp.concatenate(codes, -1)), ends, axis=-1)


def _own_slice(slices: jax.Array, group: AxisName | None) -> jax.Array:
    """The slice that this device of its group exchanges."""
    if axis_size(group) == 1:
        return slices[0]
    device = _axes.worker_index(group)
    return lax.dynamic_index_in_dim(slices, device, keepdims=False)


def _gather_group(x: jax.Array, group: AxisName | None, like: jax.Array) -> jax.Array:
    """The slices of all devices of the group, flat, typed as ``like``."""
    if axis_size(group) == 1:
        return x.reshape(-1)
    # The devices hold the same now. Types that do not vary over them must say so, which
    # takes twice the bytes of an all-gather.
    if _axes.tracked_axes(group) <= _axes.varying_axes(like):
        return _collectives.all_gather(x, group).reshape(-1)
    device = _axes.worker_index(group)
    return _collectives.all_gather_invariant(x, device, group).reshape(-1)
