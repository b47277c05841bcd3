"""The rows of a leaf that travel at a step: taking them out and putting them back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._leaves import Leaf
from slamb_jax._selections._selection import Selection


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a leaf that travel at one step.

    In the leaf's own shape throughout: XLA updates no reshaped array in place.
    """

    width: int
    starts: jax.Array | None  # coordinates, (slots, ndim); None: the leaf goes whole
    used: jax.Array  # which slots hold a row, (slots,)

    def pack(self, x: jax.Array) -> jax.Array:
        """The rows of ``x``, of shape (slots, width); any row where none is used."""
        if self.starts is None:
            return x
        x = jnp.atleast_1d(x)
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(1,),
            collapsed_slice_dims=tuple(range(x.ndim - 1)),
            start_index_map=tuple(range(x.ndim)),
        )
        sizes = (1,) * (x.ndim - 1) + (self.width,)
        # XLA moves a row beyond the last inside by itself; "clip" would do it twice.
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(x, self.starts, numbers, sizes, mode=mode)

    def unpack(self, packed: jax.Array, x: jax.Array) -> jax.Array:
        """``x`` with these rows replaced."""
        if self.starts is None:
            return packed
        shape, x = x.shape, jnp.atleast_1d(x)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=tuple(range(x.ndim - 1)),
            scatter_dims_to_operand_dims=tuple(range(x.ndim)),
        )
        # Rows beyond the last are dropped; no other repeats.
        x = lax.scatter(
            x, self.starts, packed, numbers, unique_indices=True, mode="drop"
        )
        return x.reshape(shape)


def rows_at(selection: Selection, step: jax.Array, leaf: Leaf) -> Rows:
    """The rows of the leaf that ``selection`` sends at ``step``."""
    if selection.whole(leaf):
        return Rows(1, None, jnp.ones(0, bool))
    width = selection.width(leaf)
    row = selection.rows(step, leaf)
    used = row < leaf.size // width
    shape = leaf.shape or (1,)
    places = []
    for size in (shape[-1] // width, *reversed(shape[1:-1]))[: len(shape) - 1]:
        row, place = _divmod(row, size)
        places.append(place)
    places = [row, *reversed(places)]  # a row beyond the last: beyond the first size
    places[-1] = places[-1] * width
    return Rows(width, jnp.stack(places, -1), used)


def age_at(selection: Selection, step: jax.Array, leaf: Leaf) -> jax.Array | None:
    """Steps since each row was exchanged; None for a leaf that goes whole."""
    return None if selection.whole(leaf) else selection.age(step, leaf)


def _divmod(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of what is not negative, in as few instructions."""
    if divisor & (divisor - 1) == 0:
        bits = divisor.bit_length() - 1
        return lax.shift_right_logical(x, np.int32(bits)), x & np.int32(divisor - 1)
    return lax.div(x, np.int32(divisor)), lax.rem(x, np.int32(divisor))


def elements_sent(selection: Selection, leaf: Leaf) -> int:
    """Elements of the leaf that travel per step, unused slots included."""
    if selection.whole(leaf):
        return leaf.size
    rows = jax.eval_shape(
        lambda step: selection.rows(step, leaf), jax.ShapeDtypeStruct((), jnp.int32)
    )
    return rows.size * selection.width(leaf)
