"""Every collective of the library; no other module calls one.

``axis_name`` is a name, or a tuple of names, bound by ``shard_map``, ``pmap`` or
``vmap``; None is a single worker.
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core import axes as _axes
from slamb_jax._core.axes import AxisName, axis_size
from slamb_jax._core.joining import ArrayRow, join_rows
from slamb_jax._core.leaves import Leaf
from slamb_jax._core.platform import hidden, slices
from slamb_jax._core.rounding import round_to
from slamb_jax.exchange.codecs import is_summed


def pmean(
    arrays: Sequence[jax.Array], axis_name: AxisName | None, *, typed_same: bool = False
) -> list[jax.Array]:
    """Means over the workers in one exchange: those of :func:`pmean_and_lost`."""
    return pmean_and_lost(arrays, axis_name, typed_same=typed_same)[0]


def pmean_and_lost(
    arrays: Sequence[jax.Array],
    axis_name: AxisName | None,
    *,
    within: AxisName | None = None,
    route: str = "owners",
    typed_same: bool = False,
) -> tuple[list[jax.Array], list[jax.Array | None]]:
    """Means over the workers in one exchange, in the dtype of each array.

    Arrays of 32 bits are averaged by an all-reduce, the small ones joined: a runtime
    that reduces operand after operand (gloo, on CPU) takes milliseconds for each. The
    types vary as those of the arrays; ``typed_same``: those of 32-bit means do not vary
    over the axis.

    Arrays of 16 bits are summed in float32 by the worker that owns the slice and
    rounded once: an all-to-all and a :func:`send_to_all`, with the bytes of a 16-bit
    all-reduce; or by another ``route``, as in :class:`Exchange`. (XLA's CPU backend
    widens a 16-bit all-reduce, and a sum of thousands of 16-bit terms loses what was
    saved.) Of them also what rounding takes is returned: n times the quantization error
    of the means that this worker rounded for all, and 0 elsewhere, float32; None for a
    mean of 32 bits.

    With ``within``, the axis of the devices of one worker, which hold the same arrays,
    each device averages a slice with its counterparts, and the worker gathers them. So
    the slow links carry the arrays once, and not once for every device.
    """
    out: list[Any] = list(arrays)
    # What is empty is not sent, and loses nothing.
    lost: list[Any] = [
        None if is_summed(x.dtype.name) else jnp.zeros_like(x, jnp.float32) for x in out
    ]
    if axis_name is None or (axis_size(axis_name) == 1 and not typed_same):
        return out, lost
    over = _axes.tracked_axes(axis_name)
    # Joined only with what varies over the same axes: parts keep their types.
    kinds: dict[tuple[str, ...], list[int]] = {}
    for i, x in enumerate(arrays):
        varying = _axes.varying_axes(x)
        if x.size:
            kind = (x.dtype.name, *sorted(map(str, varying)))
            kinds.setdefault(kind, []).append(i)
        elif typed_same:  # nothing is sent of it, but its type is that of a mean
            out[i] = _axes.vary_over(jnp.zeros(x.shape, x.dtype), varying - over)
    devices = axis_size(within)
    for places in kinds.values():
        group = [arrays[i] for i in places]
        summed = is_summed(group[0].dtype.name)
        if devices == 1 and summed:  # large arrays stay in place
            each = [ArrayRow(Leaf(i, x.shape), x) for i, x in enumerate(group)]
            joined = join_rows(each, lambda leaf: 1)
            columns = joined.split(lax.pmean([row.x for row in joined.rows], axis_name))
        else:  # as one array: a slice of it for each device of the worker
            flat = ravel(group)
            rows = jnp.pad(flat, (0, -flat.size % devices)).reshape(devices, -1)
            own = own_slice(rows, within)
            if summed:
                found = [lax.pmean(own, axis_name)]
            else:
                found = _pmean_16_bit(own, axis_name, route)
            wholes = [gather_slices(x, within, like=flat) for x in found]
            columns = [unravel(x, group) for x in wholes]
        for column, new in zip((out, lost), columns, strict=False):  # or out alone
            for i, x in zip(places, new, strict=True):
                axes = frozenset() if typed_same else _axes.varying_axes(arrays[i])
                column[i] = _axes.vary_over(x, axes)
    return out, lost


def _pmean_16_bit(flat: jax.Array, axis_name: AxisName, route: str) -> list[jax.Array]:
    """The mean of a flat array, and what rounding takes of it."""
    # As integers on their way: XLA widens floats of 16 bits where it can.
    n, dtype, bits = axis_size(axis_name), flat.dtype, as_integers(flat)
    direct = is_direct(route, n)
    if direct:  # each averages all, in one message
        received = send_to_all(bits, axis_name)
    else:
        rows = jnp.pad(bits, (0, -flat.size % n)).reshape(n, -1)
        received = all_to_all(rows, axis_name)
    # In float32, and rounded once: n terms in 16 bits would lose what is small.
    exact = jnp.mean(received.view(dtype).astype(jnp.float32), axis=0)
    mean = round_to(exact, dtype)
    error = exact - mean.astype(jnp.float32)
    if direct:  # all of them keep it
        return [mean, error]
    # It counts n times, since this is one of the n workers that are averaged next.
    mean = send_to_all(as_integers(mean), axis_name).view(dtype)
    error = in_own_row(np.float32(n) * error, axis_name)
    return [x.reshape(-1)[: flat.size] for x in (mean, error)]


def ravel(arrays: Sequence[jax.Array]) -> jax.Array:
    """All elements, one array after the other."""
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def unravel(flat: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Undoes :func:`ravel`, with the shapes of ``arrays``."""
    starts = list(itertools.accumulate([x.size for x in arrays[:-1]], initial=0))
    return slices(flat, hidden(starts), [x.shape for x in arrays])


def is_direct(route: str, workers: int) -> bool:
    """Whether each worker sends all of its own to all others, as two always do."""
    return route == "all" or workers == 2


def all_to_all(x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """All-to-all on the leading axis: row i is sent to worker i."""
    received: jax.Array = lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0)
    return received


def send_to_all(x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """``x`` of all workers, stacked: an all-gather that waits for one message.

    Each worker sends its own to all others at once, in an all-to-all of copies. XLA's
    all-gather has the same bytes, which go from worker to worker around a ring: it
    waits for n - 1 messages, one after the other.
    """
    n, manual = axis_size(axis_name), jax.sharding.get_abstract_mesh().manual_axes
    # Under vmap the workers share what is gathered, and would not share copies. Of two
    # each waits for one message anyhow.
    if n == 2 or not set(_axes.as_tuple(axis_name)) <= set(manual):
        return lax.all_gather(x, axis_name)
    return all_to_all(jnp.broadcast_to(x, (n, *x.shape)), axis_name)


def own_slice(slices: jax.Array, group: AxisName | None) -> jax.Array:
    """The slice that this device of its group exchanges."""
    if axis_size(group) == 1:
        return slices[0]
    return lax.dynamic_index_in_dim(slices, lax.axis_index(group), keepdims=False)


def gather_slices(x: jax.Array, group: AxisName | None, like: jax.Array) -> jax.Array:
    """The slices of all devices of the group, flat, typed as ``like``."""
    if group is None or axis_size(group) == 1:
        return x.reshape(-1)
    bits = as_integers(x).reshape(-1)
    if _axes.tracked_axes(group) <= _axes.varying_axes(like):
        rows = lax.all_gather(bits, group)
    else:
        # The devices hold the same now. Where types do not vary over them an
        # all-gather's would: each adds zeros for all others, which takes twice the
        # bytes. In integers that sum is exact, for NaN and -0.0 too.
        rows = lax.psum(in_own_row(bits, group), group)
    return rows.reshape(-1).view(x.dtype)


def in_own_row(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """``x`` in this worker's row of those of all, (n, ...), and zeros elsewhere."""
    rows = lax.broadcasted_iota(jnp.int32, (axis_size(axis_name), *x.shape), 0)
    return jnp.where(rows == lax.axis_index(axis_name), x, jnp.zeros_like(x))


def gather_shards(x: jax.Array, axes: Sequence[tuple[Hashable, ...]]) -> jax.Array:
    """The whole of ``x``, whose leading dimensions are sharded over these axes."""
    for i, names in enumerate(axes):
        x = lax.all_gather(x, names, axis=i, tiled=True) if names else x
    return x


def own_shard(x: jax.Array, axes: Sequence[tuple[Hashable, ...]]) -> jax.Array:
    """Undoes :func:`gather_shards`; nothing is sent."""
    # The first dimension is sharded over the first axes, and so on.
    for i, names in enumerate(axes):
        if names:
            size = x.shape[i] // axis_size(names)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, i)
    return x


def send(x: jax.Array, axis_name: AxisName, pairs: list[tuple[int, int]]) -> jax.Array:
    """``x`` of the first worker of each pair to the second; zeros to all others."""
    return lax.ppermute(x, axis_name, pairs)


def as_integers(x: jax.Array) -> jax.Array:
    """The bits of an array, 32 at most in each."""
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return x.view(width)  # of complex numbers, too


def psum_each(
    trees: Sequence[chex.ArrayTree], axes: Sequence[tuple[Hashable, ...]]
) -> list[Any]:
    """Sums each tree of small float32 arrays over mesh axes of its own.

    Trees with the same axes share an all-reduce, if their types vary over the same axes
    too: so no type comes to vary over more axes than those of its tree.
    """
    out = list(trees)
    flat = [jax.tree.leaves(tree) for tree in trees]
    types = [frozenset().union(*map(_axes.varying_axes, arrays)) for arrays in flat]
    # Without axes a tree is whole already.
    kinds = list(zip(axes, types, strict=True))
    for kind in dict.fromkeys(x for x in kinds if x[0]):
        places = [i for i, x in enumerate(kinds) if x == kind]
        arrays, treedef = jax.tree.flatten([trees[i] for i in places])
        sums = unravel(lax.psum(ravel(arrays), kind[0]), arrays)
        for i, tree in zip(places, jax.tree.unflatten(treedef, sums), strict=True):
            out[i] = tree
    return out


def pany(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether ``flag`` is set on any worker.

    Fit to choose a branch that exchanges: under ``check_vma=True`` its type does not
    vary over the axis, and under ``vmap`` it is not batched.
    """
    if axis_size(axis_name) == 1:
        return flag
    return lax.pmax(flag.astype(jnp.int32), axis_name) > 0
