"""Means over the workers: the only algorithm of the library that sends in codes.

In codes, every worker owns a slice of the arrays; see :func:`_mean_in_codes`. What is
not in codes is averaged by :func:`slamb_jax.exchange.collectives.pmean`.

No array is padded for the number of workers: an array ends within a slice. A slice is
cut between rows of groups, and never between planes, whose digits share bytes. Where a
worker is a group of devices, each device of it owns a slice, too.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core import axes as _axes
from slamb_jax._core import platform as _platform
from slamb_jax._core.axes import axis_size
from slamb_jax._core.joining import ArrayRow, Joined, join_rows
from slamb_jax._core.leaves import Leaf
from slamb_jax._core.rounding import hash_u32, hash_words, round_to
from slamb_jax.exchange import collectives as _collectives
from slamb_jax.exchange.codecs import CODECS, BlockCodec, Cut, cut_among
from slamb_jax.exchange.settings import Exchange


class Means(NamedTuple):
    """The means of arrays over the workers; every array has its input's shape.

    Attributes:
      means: in the input's dtype, the same bits on all workers.
      sent: float32; what this worker sent, as the others decode it. None for an array
        of which nothing is rounded.
      lost: float32; n times the quantization error of the means that this worker owns,
        and 0 elsewhere. The mean of ``sent`` over the workers is the mean plus the mean
        of ``lost``. None as ``sent``, and in codes that all send to all: no mean is
        encoded.
      is_finite: tells whether all that arrived first is finite, which it is not where
        a worker sent nothing but NaN; the same on all workers. None: nothing arrived.
    """

    means: Sequence[jax.Array]
    sent: Sequence[jax.Array | None]
    lost: Sequence[jax.Array | None]
    is_finite: Callable[[], jax.Array] | None = None


def mean_over_workers(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    exchange: Exchange,
    payload: str | None,
    step: jax.Array,
) -> Means:
    """Takes the means of arrays in the wire format of a payload.

    Args:
      arrays: this worker's, one for each leaf; any part of the leaf.
      leaves: the leaves that the arrays are of.
      exchange: between whom.
      payload: as in :class:`Exchange`; None sends each array in its own dtype.
      step: seeds the random rounding.
    """
    axis_name = exchange.axis_name
    # 1. What is not sent stays as it is: all of a single worker's, and empty arrays.
    nothing = [None] * len(arrays)
    if axis_size(axis_name) == 1:
        return Means(arrays, nothing, nothing)
    # 2. Without codes, of the types that are sent.
    if (codec := CODECS.get(payload)) is None:
        return _mean_in_floats(arrays, exchange, payload)
    # 3. In codes, by two messages for each kind, whatever the number of leaves: each
    # has a latency, and XLA never combines an all-to-all with another. Arrays that
    # differ between the shards of a worker share no scale with arrays that do not.
    wide = [x.astype(jnp.float32) for x in arrays]
    kinds: dict[Hashable, list[ArrayRow]] = {}
    for i, (x, leaf) in enumerate(zip(wide, leaves, strict=True)):
        if x.size:
            varying = sorted(map(str, _axes.varying_axes(x)))
            row = ArrayRow(Leaf(i, x.shape, parts=leaf.parts, unit=leaf.unit), x)
            kinds.setdefault((leaf.sharded, *varying), []).append(row)
    is_direct = _collectives.is_direct(exchange.route, axis_size(axis_name))
    zeros = nothing if is_direct else [jnp.zeros_like(x) for x in wide]
    columns: list[list[Any]] = [list(arrays), list(wide), zeros]
    is_finite = None
    for rows in kinds.values():
        # 4. Small ones as one, but for what was joined before.
        joined = join_rows(rows, lambda leaf: codec.group_of(leaf.size).size)
        pairs = sorted(zip(*joined, strict=True), key=lambda pair: pair[0][0])
        joined = Joined([x for x, _ in pairs], [x for _, x in pairs])  # as given
        # 5. The mean of each kind, in the places of its arrays.
        found, is_finite = _mean_in_codes(joined.rows, exchange, codec, step)
        for column, new in zip(columns, joined.split(*found), strict=False):
            for (leaf, _), x in zip(rows, new, strict=True):
                # A mean's type does not vary over the workers; the state's, that it
                # goes into, does.
                axes = _axes.varying_axes(arrays[leaf.index])
                x = x.astype(column[leaf.index].dtype)
                column[leaf.index] = _axes.vary_over(x, axes)
    means, sent, lost = columns
    return Means(means, sent, lost, is_finite)


def _mean_in_floats(
    arrays: Sequence[jax.Array], exchange: Exchange, payload: str | None
) -> Means:
    """The mean in the dtypes that are sent; of 16 bits also what rounding takes."""
    rounded = [round_to(x, payload or x.dtype) for x in arrays]
    means, lost = _collectives.pmean_and_lost(
        rounded,
        exchange.axis_name,
        within=exchange.local_axis_name,
        route=exchange.route,
    )
    means = [mean.astype(x.dtype) for mean, x in zip(means, arrays, strict=True)]
    firsts = [mean.reshape(-1)[0] for mean in means if mean.size]
    is_finite = functools.partial(jnp.isfinite, firsts[0]) if firsts else None
    pairs = zip(rounded, lost, strict=True)
    sent = [None if error is None else x.astype(jnp.float32) for x, error in pairs]
    return Means(means, sent, lost, is_finite)


def _mean_in_codes(
    rows: Sequence[ArrayRow], exchange: Exchange, codec: BlockCodec, step: jax.Array
) -> tuple[list[list[jax.Array]], Callable[[], jax.Array]]:
    """The mean of float32 arrays in codes, to the owner of each slice and back.

    1. Encode: a worker encodes its arrays, and cuts the codes into a slice for each
       owner. Arrays whose groups have another shape are another part.
    2. All-to-all: each owner gets the codes of its slice from all workers.
    3. Average: it decodes and averages them.
    4. Encode again: it encodes the mean.
    5. All-gather: all workers get the codes of all means.
    6. Decode: the same codes, and so the same means to the bit, on all workers.

    Where all send to all, as two workers do, each owns all: it gets all codes of the
    others, decodes and averages them. That is one message, of n / 2 times the bytes,
    and nothing is encoded again.

    Returns for each array its mean, what this worker sent, and what the second encoding
    lost, if there is one; and a function that tells whether what came first is finite.
    """
    axis_name, group = exchange.axis_name, exchange.local_axis_name
    n, width, like = axis_size(axis_name), axis_size(group), rows[0].x
    # 1. Encode. All parts travel in one message, of what this device exchanges.
    parts = _encode(rows, exchange, codec, step)
    is_direct = parts[0].place.owners == 1
    slices = [part.slices() for part in parts]
    ends = np.cumsum([x.shape[-1] for x in slices])[:-1]
    own = jnp.concatenate(slices, -1)
    own = own[0] if group is None else _collectives.own_slice(own, group)
    pairs: list[tuple[jax.Array, jax.Array]] = []
    if is_direct:
        shared = _collectives.send_to_all(own, axis_name)
    else:
        # 2. All-to-all.
        received = jnp.split(_collectives.all_to_all(own, axis_name), ends, -1)
        # 3. Average, and 4. encode again.
        pairs = [part.average(x) for part, x in zip(parts, received, strict=True)]
        # 5. All-gather, first between the workers and then within.
        flat = jnp.concatenate([code for _, code in pairs])
        shared = _collectives.send_to_all(flat, axis_name)
    if group is not None:
        shared = _collectives.gather_slices(shared, group, like)
    wholes = jnp.split(shared.reshape(width, n, -1), ends, -1)
    # 6. Decode.
    decode = _Part.average_all if is_direct else _Part.decode_slices
    means = [x for arrays in map(decode, parts, wholes) for x in arrays]
    sent: list[jax.Array] = []  # as the other workers decode it
    for part in parts:
        sent += part.arrays([codec.decode(*code) for code in part.codes])
    errors: list[jax.Array] = []
    # The owner alone knows the error of the second encoding. It counts n times, since
    # the owner is one of the n workers whose momenta are averaged next.
    for part, (mean, code) in zip(parts, pairs, strict=False):
        error = np.float32(n) * (mean - part.decode_slice(code))
        if group is not None:
            error = _collectives.gather_slices(error, group, like)
        own_rows = _collectives.in_own_row(error.reshape(width, *mean.shape), axis_name)
        errors += part.arrays(part.groups(own_rows.swapaxes(0, 1)))
    # In the order of the rows.
    order = np.argsort([i for part in parts for i in part.cut.members])
    columns = [[x[i] for i in order] for x in (means, sent, errors) if x]
    return columns, functools.partial(parts[0].is_finite, wholes[0])


def _encode(
    rows: Sequence[ArrayRow], exchange: Exchange, codec: BlockCodec, step: jax.Array
) -> list["_Part"]:
    """The arrays in codes, and how they are cut among owners."""
    n, group = axis_size(exchange.axis_name), exchange.local_axis_name
    owners = 1 if _collectives.is_direct(exchange.route, n) else n
    width = axis_size(group)
    device = jnp.int32(0) if group is None else lax.axis_index(group)
    place = Place(owners, width, lax.axis_index(exchange.axis_name), device)
    # Joined leaves have blocks as each of them has by itself.
    alike = [(*leaf.parts, leaf)[0].size for leaf, _ in rows]
    cuts = cut_among([x.size for _, x in rows], codec, owners * width, alike)
    return [
        _Part(cut, [rows[i] for i in cut.members], codec, place, step, number)
        for number, cut in enumerate(cuts)
    ]


class Place(NamedTuple):
    """Which device of how many this is."""

    owners: int  # workers among whom the slices are divided
    width: int  # devices of a worker
    worker: jax.Array
    device: jax.Array  # of its worker


class _Part:
    """Arrays that are cut alike, in codes: what of them travels, and what it means.

    Attributes:
      number: of this part among all.
      shapes: of the arrays.
      ends: where the groups of each array end, from 0.
      codes: of each array.
    """

    def __init__(
        self,
        cut: Cut,
        rows: Sequence[ArrayRow],
        codec: BlockCodec,
        place: Place,
        step: jax.Array,
        number: int,
    ) -> None:
        self.cut, self.codec, self.place = cut, codec, place
        self.step, self.number = step, number
        self.leaves, arrays = zip(*rows, strict=True)
        self.shapes = [x.shape for x in arrays]
        self.ends = [0, *np.cumsum([-(-x.size // cut.group.size) for x in arrays])]
        # Each in its place, since to concatenate them would be to copy them.
        self.codes = []
        for i, x in enumerate(arrays):
            seed = self._seed(jnp.int32(0), 3 + i) if codec.draws else None
            encode = functools.partial(codec.encode, seed=seed)
            self.codes.append(_platform.map_groups(encode, x, cut.group[1:]))

    def _seed(self, device: jax.Array, stage: int) -> jax.Array:
        """The seed of the random bits of one device of this worker at one stage.

        Devices of a worker hold the same arrays, and must round them alike: what is
        encoded by all has the seed of device 0, an owner's mean that of its own.
        """
        seed = hash_u32(self.step.astype(jnp.uint32), hash_words(0, 0x5A17))
        seed = hash_u32(seed, hash_words(self.number))
        # All workers round with bits of their own, or their errors would add up in the
        # mean in place of cancelling. So every device has a number, every stage a seed.
        number = self.place.worker * jnp.int32(self.place.width) + device
        return hash_u32(hash_u32(number.astype(jnp.uint32), seed), hash_words(stage))

    def slices(self) -> jax.Array:
        """The codes in slices for their owners: uint8 (devices, workers, bytes)."""
        own, owners = self.cut.slice, (self.place.width, self.place.owners)
        digits, scales = map(jnp.concatenate, zip(*self.codes, strict=True))
        # Scales travel behind the digits, in bytes: one collective has one dtype, and
        # each collective has a latency of its own.
        columns = []
        for x in (digits, scales):
            # All rows of all groups, one after the other, and those that fill slices.
            x = x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1])
            rest = math.prod(owners) * own.groups * own.rows - x.shape[1]
            x = jnp.pad(x, ((0, 0), (0, rest), (0, 0)))
            x = x.reshape(len(x), *owners, own.groups, own.rows, x.shape[-1])
            columns.append(jnp.moveaxis(x, 0, 3).reshape(*owners, -1))
        return jnp.concatenate(columns, -1)

    def average(self, received: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mean of this device's slice from the codes of all, (workers, bytes).

        And the code of the mean, uint8 (bytes,).
        """
        total = _platform.sum_of_codes(self.decode_slice, received)
        mean = total / np.float32(len(received))
        if not self.codec.has_zero:
            mean = jnp.where(self._is_element(), mean, jnp.zeros_like(mean))
        seed = self._seed(self.place.device, 2) if self.codec.draws else None
        code = self.codec.encode(mean, seed=seed)
        return mean, jnp.concatenate([x.reshape(-1) for x in code])

    def decode_slice(self, code: jax.Array) -> jax.Array:
        """The slice of groups whose code this is, (bytes,)."""
        return self.codec.decode(*self.codec.split_bytes(code, self.cut.slice))

    def decode_slices(self, codes: jax.Array) -> list[jax.Array]:
        """The arrays of all slices, from codes (devices, workers, bytes)."""
        code = self.codec.split_bytes(codes, self.cut.slice)
        # Put in the order of the arrays while they are bytes: a GPU would split all
        # digits first, and keep them.
        columns = _platform.materialized([self.groups(x) for x in code])
        return self.arrays(list(map(self.codec.decode, *columns)))

    def average_all(self, codes: jax.Array) -> list[jax.Array]:
        """The mean of the workers' arrays, from codes (devices, workers, bytes)."""
        rows = jnp.moveaxis(codes, 1, 0)[:, :, None]
        total = _platform.sum_in_turn(self.decode_slices, rows)
        return [x / np.float32(len(rows)) for x in total]

    def is_finite(self, codes: jax.Array) -> jax.Array:
        """Whether the first scales of the slices are, of codes (..., bytes)."""
        _, scales = self.codec.split_bytes(codes, self.cut.slice)
        firsts = scales.reshape(*codes.shape[:-1], -1, scales.shape[-1])[..., 0, :]
        return jnp.isfinite(lax.bitcast_convert_type(firsts, jnp.float32)).all()

    def _is_element(self) -> jax.Array:
        """Which elements of this device's slice are of leaves, and no padding."""
        group, own = self.cut.group, self.cut.slice
        # The elements of each group, and of one behind them all.
        sizes = [x.size for leaf in self.leaves for x in leaf.parts or (leaf,)]
        rest = [size - i for size in sizes for i in range(0, size, group.size)]
        counts = jnp.asarray(np.minimum([*rest, 0], group.size), jnp.int32)
        # The row of all groups, and from it the group and the place in it.
        number = self.place.device * jnp.int32(self.place.owners) + self.place.worker
        of, plane, of_row, column = (
            lax.broadcasted_iota(jnp.int32, own, i) for i in range(4)
        )
        row = (number * own.groups + of) * own.rows + of_row
        count = counts[jnp.minimum(row // group.rows, len(counts) - 1)]
        place = (plane * group.rows + row % group.rows) * group.width + column
        return place < count

    def groups(self, slices: jax.Array) -> list[jax.Array]:
        """The groups of each array, of slices (devices, workers, ...).

        Undoes the cut of :meth:`slices`.
        """
        # All rows again, without what filled the slices.
        x, rows = jnp.moveaxis(slices, 3, 0), self.cut.group.rows
        x = x.reshape(len(x), -1, x.shape[-1])[:, : self.ends[-1] * rows]
        x = x.reshape(len(x), -1, rows, x.shape[-1]).swapaxes(0, 1)
        return [x[a:b] for a, b in itertools.pairwise(self.ends)]

    def arrays(self, groups: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays that were cut into these groups, without their padding."""
        pairs = zip(groups, self.shapes, strict=True)
        return [x.reshape(-1)[: math.prod(s)].reshape(s) for x, s in pairs]
