"""Everything that talks to other workers: no other module calls a collective.

``axis_name`` is a name, or a tuple of names, bound by ``shard_map``, ``pmap`` or
``vmap``; None is a single worker.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from slamb_jax._axes import AxisName, axis_size, vary_over, varying_axes

_ALONE = 2**20  # elements; an array of as many gains nothing from company


def mean_over(
    arrays: Sequence[jax.Array], axis_name: AxisName | None, *, typed_same: bool = False
) -> list[jax.Array]:
    """Means over the workers, in one exchange, in the dtype of each array.

    Arrays of 32 bits go through an all-reduce, the smaller ones joined into one: a
    runtime that reduces operand after operand (gloo, on CPU) takes milliseconds for
    each, however small. Those of 16 bits are summed in
    float32 by the worker that owns the slice, and rounded once: an all-to-all and an
    all-gather, the two halves of an all-reduce, with as many bytes on the wire as a
    16-bit all-reduce would have. (XLA's CPU backend turns that into a 32-bit one,
    and summing thousands of 16-bit terms loses what was saved.) Their types vary as
    those of the arrays, unless ``typed_same``: then, for 32 bits, not over the axis.
    """
    n = axis_size(axis_name)
    out = list(arrays)
    if n == 1 and not typed_same:
        return out
    # Joined only with what varies over the same axes: the parts keep their types.
    kinds = [(x.dtype.name, *sorted(map(str, varying_axes(x)))) for x in arrays]
    for kind in sorted(set(kinds)):
        places = [i for i, x in enumerate(arrays) if kinds[i] == kind and x.size]
        if not places:
            continue
        group = [arrays[i] for i in places]
        narrow = group[0].dtype.itemsize == 2
        means = (_narrow_mean if narrow else _wide_mean)(group, axis_name)
        for i, mean in zip(places, means, strict=True):
            axes = frozenset() if typed_same else varying_axes(arrays[i])
            out[i] = vary_over(mean, axes)
    return out


def _wide_mean(arrays: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    small = [x for x in arrays if x.size < _ALONE]
    large = [x for x in arrays if x.size >= _ALONE]
    operands = large + ([join(small)] if small else [])
    means = jax.lax.pmean(operands, axis_name)
    parts = iter(part(means[-1], small) if small else [])
    wholes = iter(means)
    return [next(parts if x.size < _ALONE else wholes) for x in arrays]


def _narrow_mean(arrays: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    n, dtype = axis_size(axis_name), arrays[0].dtype
    flat = join(arrays)
    slices = jnp.pad(flat, (0, -flat.size % n)).reshape(n, -1)
    # As integers: XLA widens a 16-bit float collective where it can, not these.
    bits = jax.lax.bitcast_convert_type(slices, jnp.uint16)
    bits = jax.lax.all_to_all(bits, axis_name, split_axis=0, concat_axis=0)
    mine = jax.lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)
    mean = jnp.mean(mine, axis=0).astype(dtype)
    bits = jax.lax.bitcast_convert_type(mean, jnp.uint16)
    bits = jax.lax.all_gather(bits, axis_name, tiled=True)
    return part(jax.lax.bitcast_convert_type(bits, dtype), arrays)


def join(arrays: Sequence[jax.Array]) -> jax.Array:
    """All elements, one array behind the other."""
    return jnp.concatenate([x.reshape(-1) for x in arrays])


def part(flat: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """What :func:`join` joined, in the shapes of ``arrays``."""
    ends = [sum(x.size for x in arrays[: i + 1]) for i in range(len(arrays))]
    parts = jnp.split(flat, ends)
    return [part.reshape(x.shape) for part, x in zip(parts, arrays, strict=False)]


def swap(codes: jax.Array, axis_name: AxisName) -> jax.Array:
    """Row i goes to worker i: of shape (n, ...), what each worker had for this one."""
    return jax.lax.all_to_all(codes, axis_name, split_axis=0, concat_axis=0)


def gather(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """``x`` of all workers, of shape (n, ...)."""
    if x.dtype.itemsize != 2:
        return jax.lax.all_gather(x, axis_name)
    bits = jax.lax.all_gather(_as_integers(x), axis_name)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def gather_same(x: jax.Array, place: jax.Array, axis_name: AxisName) -> jax.Array:
    """:func:`gather`, whose result's type says that it is the same on all workers.

    As a sum of zeros and one other, of integers: it sends twice as much.
    """
    bits = _as_integers(x)
    rows = jnp.arange(axis_size(axis_name), dtype=place.dtype) == place
    mine = rows.reshape(-1, *(1,) * x.ndim)
    bits = jax.lax.psum(jnp.where(mine, bits[None], jnp.zeros_like(bits)), axis_name)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def _as_integers(x: jax.Array) -> jax.Array:
    """The bits of a narrow ``x``: XLA widens 16-bit floats where it can, not these."""
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width)


def agreed_mean(tree: chex.ArrayTree, axis_name: AxisName | None) -> chex.ArrayTree:
    """Means over the workers, bit-identical on all; other dtypes than floats pass.

    Sums in float32 at least. Under ``check_vma=True`` their type says that they do not
    vary over the axis, be it of one worker.
    """
    if axis_name is None:
        return tree
    axis_size(axis_name)  # tells of an axis that is not bound

    def mean(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
            return x
        return jax.lax.pmean(widened(x), axis_name).astype(x.dtype)

    return jax.tree.map(mean, tree)


def sum_over(tree: chex.ArrayTree, axes: tuple[Hashable, ...]) -> chex.ArrayTree:
    """Sums of small float32 arrays over mesh axes, all in one all-reduce."""
    if not axes:
        return tree
    arrays, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, part(jax.lax.psum(join(arrays), axes), arrays))


def narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """``x`` in ``dtype``, rounded before it is cast.

    XLA may leave out a cast there and back, and with it what rounding took; not this.
    """
    if x.dtype == dtype or jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp > jnp.finfo(x.dtype).minexp:  # it has no subnormals
        tiny, least = x.dtype.type(info.tiny), x.dtype.type(info.smallest_subnormal)
        rounded = jnp.where(jnp.abs(x) < tiny, jnp.round(x / least) * least, rounded)
    return rounded.astype(dtype)


def widened(x: jax.Array) -> jax.Array:
    """``x`` in float32, or wider where it is wider."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def on_any(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Whether ``flag`` is set on any worker: a bool that all of them agree on.

    Fit to choose a branch that exchanges: under ``check_vma=True`` its type does not
    vary over the axis, and under ``vmap`` it is not batched.
    """
    if axis_size(axis_name) == 1:
        return flag
    return jax.lax.pmax(flag.astype(jnp.int32), axis_name) > 0
