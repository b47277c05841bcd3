"""Means over the workers of what travels, in the precision in which it travels.

``local_axis_name`` is the axis within a group of devices that all hold the same arrays:
each then exchanges a slice with its like in the other groups, and they share what they
got. So the links between groups carry the arrays once, not once for each device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax import _axes, _collectives
from slamb_jax._axes import AxisName
from slamb_jax._hashing import hash_u32, hash_words
from slamb_jax._quantize import Payload, Quantizer


class Route(NamedTuple):
    """Between whom, and as what."""

    axis_name: AxisName | None
    local_axis_name: AxisName | None = None
    payload: Payload = None

    @property
    def feeds_back(self) -> bool:
        """Whether a worker keeps what rounding took of what it sent."""
        return isinstance(self.payload, Quantizer) and self.payload.error_feedback


class Exchanged(NamedTuple):
    """What came of it, each in the shape of what was given.

    Attributes:
      means: over the workers, the same bits on all, in the dtype of what was given.
      sent: float32; what each worker sent, as the others read it; as it was, where it
        is the worker itself that takes the mean.
      owed: float32; n times what rounding took of a mean, on the worker that rounded
        it, 0 elsewhere: with it the mean over the workers is exact, to float32; what
        storing it in 16 bits takes is not in it. None if nothing.
    """

    means: list[jax.Array]
    sent: list[jax.Array]
    owed: list[jax.Array] | None


def means_of(
    arrays: Sequence[jax.Array], route: Route, step: jax.Array
) -> list[jax.Array]:
    """Means over the workers."""
    return _exchange(arrays, route, step, keep=False).means


def exchange(arrays: Sequence[jax.Array], route: Route, step: jax.Array) -> Exchanged:
    """Means over the workers, and what rounding took of them."""
    return _exchange(arrays, route, step, keep=True)


def _exchange(
    arrays: Sequence[jax.Array], route: Route, step: jax.Array, *, keep: bool
) -> Exchanged:
    axis_name, local_axis_name, payload = route
    alone = _axes.axis_size(axis_name) == 1
    if alone or (payload is None and local_axis_name is None):
        means = _collectives.mean_over(arrays, axis_name)
        return Exchanged(means, [x.astype(jnp.float32) for x in arrays], None)
    coded = isinstance(payload, Quantizer)
    means, owed = list(arrays), None
    if coded and keep:
        owed = [jnp.zeros(x.shape, jnp.float32) for x in arrays]
    sent = [x.astype(jnp.float32) for x in arrays]
    common = payload if isinstance(payload, str) else "float32" if coded else None
    kinds = {i: common or x.dtype.name for i, x in enumerate(arrays)}
    for kind in sorted(set(kinds.values())):
        places = [i for i, x in enumerate(arrays) if kinds[i] == kind and x.size]
        if not places:
            continue
        group = [arrays[i] for i in places]
        flat = _collectives.join([_collectives.narrowed(x, kind) for x in group])
        found = (_coded if coded else _plain)(flat, route, step, keep)
        for column, whole in zip((means, sent, owed), found, strict=True):
            if column is None or whole is None:
                continue
            for i, x in zip(places, _collectives.part(whole, group), strict=True):
                dtype = arrays[i].dtype if column is means else jnp.float32
                axes = _axes.varying_axes(arrays[i])
                column[i] = _axes.vary_over(x.astype(dtype), axes)
    return Exchanged(means, sent, owed)


def _plain(flat: jax.Array, route: Route, step: jax.Array, keep: bool) -> Any:
    """The mean as a float; each device of a group sends its slice."""
    del step
    mine, place = _slice_of(_cut(flat, _width(route)), route)
    (mean,) = _collectives.mean_over([mine], route.axis_name)
    means = _joined(mean, place, route, like=flat)[: flat.size]
    return means, flat if keep else None, None


def _coded(flat: jax.Array, route: Route, step: jax.Array, keep: bool) -> Any:
    """The mean in codes: to the owner of a slice, averaged, coded again, shared."""
    quantizer: Any = route.payload
    back = quantizer.for_means
    n, w = _axes.axis_size(route.axis_name), _width(route)
    slices = _cut(flat, w * n).reshape(w, n, -1)
    size = slices.shape[-1]
    me = _axes.worker_index(route.axis_name)
    salt = hash_u32(step.astype(jnp.uint32), hash_words(quantizer.seed, 0x5A17))

    def salts(stage: int, place: jax.Array) -> jax.Array:
        word = (me * jnp.int32(w) + place).astype(jnp.uint32)
        return hash_u32(hash_u32(word, salt), hash_words(stage))

    def coded(slices: jax.Array, place: jax.Array) -> jax.Array:
        return quantizer.encode(slices, salts(0, place))

    sent = owed = exact = None
    mine, place = _slice_of(slices, route)
    if keep:
        here = (jnp.arange(n, dtype=jnp.int32) == me)[None, :, None]
        every = jax.vmap(coded)(slices, jnp.arange(w, dtype=jnp.int32))
        sent = jnp.where(here, slices, quantizer.decode(every, size))
        sent = sent.reshape(-1)[: flat.size]
        codes, _ = _slice_of(every, route)
        # What a worker owes of the means it takes need not be rounded a second time.
        exact = me, jax.lax.dynamic_index_in_dim(mine, me, keepdims=False)
    else:
        codes = coded(mine, place)
    codes = _collectives.swap(codes, route.axis_name)
    mean = _mean_of_rows(quantizer, codes, size, exact)
    own = back.encode(mean, salts(1, place))
    shared = _collectives.gather(own, route.axis_name)
    shared = _joined(shared, place, route, like=flat)
    means = back.decode(shared.reshape(w, n, -1), size).reshape(-1)
    if keep:
        lost = np.float32(n) * (mean - back.decode(own, size))
        lost = _joined(lost, place, route, like=flat).reshape(w, 1, size)
        owed = jnp.where(here, lost, jnp.float32(0)).reshape(-1)[: flat.size]
    return means[: flat.size], sent, owed


def _mean_of_rows(
    quantizer: Any,
    codes: jax.Array,
    size: int,
    exact: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Row after row: to sum columns of what all say takes a CPU six times as long.

    ``exact``: the place of a row that is known better than by its codes, and that row.
    """

    def row(i: Any) -> jax.Array:
        coded = jax.lax.dynamic_index_in_dim(codes, i, keepdims=False)
        decoded = quantizer.decode(coded, size)
        return decoded if exact is None else jnp.where(i == exact[0], exact[1], decoded)

    total = jax.lax.fori_loop(1, len(codes), lambda i, sum_: sum_ + row(i), row(0))
    return total / np.float32(len(codes))


def _width(route: Route) -> int:
    return _axes.axis_size(route.local_axis_name)


def _cut(flat: jax.Array, count: int) -> jax.Array:
    """Filled up with zeros, as so many slices."""
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _slice_of(slices: jax.Array, route: Route) -> tuple[jax.Array, jax.Array]:
    """The slice that this device of its group sends, and its place."""
    if _width(route) == 1:
        return slices[0], jnp.int32(0)
    place = _axes.worker_index(route.local_axis_name)
    return jax.lax.dynamic_index_in_dim(slices, place, keepdims=False), place


def _joined(x: jax.Array, place: jax.Array, route: Route, like: jax.Array) -> jax.Array:
    """The slices of all devices of the group, flat."""
    axis_name, w = route.local_axis_name, _width(route)
    if w == 1:
        return x.reshape(-1)
    wanted = _axes.tracked_axes(axis_name) - _axes.varying_axes(like)
    if not wanted:
        return _collectives.gather(x, axis_name).reshape(-1)
    return _collectives.gather_same(x, place, axis_name).reshape(-1)
