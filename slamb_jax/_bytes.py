"""The bytes that an exchange sends."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp

from slamb_jax._checks import check_floating
from slamb_jax._codes import cut_among, quantizer_of
from slamb_jax._layout import Layout
from slamb_jax._leaves import Leaf, leaves_of
from slamb_jax.selections import elements_sent

if TYPE_CHECKING:
    from slamb_jax.exchange import Exchange


def slice_nbytes(sizes: Sequence[int], payload: str, owners: int) -> int:
    """Bytes of one owner's slice of arrays of these sizes, in codes."""
    quantizer = quantizer_of(payload)
    assert quantizer is not None
    return sum(quantizer.nbytes(x.slice) for x in cut_among(sizes, quantizer, owners))


def sent_of(leaves: list[Leaf], exchange: "Exchange") -> list[tuple[int, int]]:
    """Elements of each leaf that are sent: of its momentum a step, and an average."""
    momenta = [0] * len(leaves)
    if exchange.selection is not None:
        selection = exchange.selection.for_leaves(leaves)
        momenta = [elements_sent(selection, leaf) for leaf in leaves]
    return [(m, leaf.size) for m, leaf in zip(momenta, leaves, strict=True)]


def share_of(exchange: "Exchange", params: chex.ArrayTree) -> float:
    """Bytes of a step over those of a mean of float32 gradients."""
    check_floating(params, "params")
    leaves = leaves_of(params, Layout(None, exchange.stacked))
    dense = sum(leaf.size for leaf in leaves)
    if not dense:
        raise ValueError(f"params must have elements, got {params!r}")
    sizes = sent_of(leaves, exchange)
    sent: float = 4 * sum(momentum for momentum, _ in sizes)
    if exchange.sync_every is not None:
        itemsize = max(x.dtype.itemsize for x in jax.tree.leaves(params))
        in_float32 = exchange.outer is not None or exchange.averages_momentum
        if quantizer_of(exchange.payload) is not None:
            average = slice_nbytes([x for _, x in sizes], str(exchange.payload), 1)
        else:
            wide = 4 if in_float32 else itemsize
            payload = exchange.payload
            average = dense * (wide if payload is None else jnp.dtype(payload).itemsize)
        sent += average / exchange.sync_every
    return sent / (4 * dense)
