"""The share of dense bytes that an exchange takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp

from slamb_jax._checks import check_floating, check_range
from slamb_jax._ex.cuts import slice_nbytes
from slamb_jax._ex.payloads import Payload, Quantizer, resolve_payload
from slamb_jax._ex.selections import elements_sent
from slamb_jax._layout import Layout
from slamb_jax._leaves import Leaf, leaves_of

if TYPE_CHECKING:
    from slamb_jax.exchange import Exchange

ABOVE_DENSE = {
    "ternary": {"8 workers x 8": -4.1},
    "largest_of_7": {"8 workers x 8": -1.6},
    "largest_of_31": {"8 workers x 8": 5.9},
    "largest_of_127": {"8 workers x 8": 18.5},
}
"""By wire format, the loss of :func:`slamb_jax.adamw` above dense AdamW's in per cent,
of a small language model on so many sequences a worker, as ``benchmarks/frontier``
recorded it."""

FORMATS = tuple(ABOVE_DENSE)
"""Wire formats of the average to choose from, the most bytes first."""


def share_of(exchange: "Exchange", params: chex.ArrayTree) -> float:
    """Bytes of a step over those of a mean of float32 gradients; averages amortized."""
    check_floating(params, "params")
    leaves = leaves_of(params, Layout(None, exchange.stacked))
    dense = sum(leaf.size for leaf in leaves)
    if not dense:
        raise ValueError(f"params must have elements, got {params!r}")
    sizes = sent_of(leaves, exchange)
    sent = _bytes([momentum for momentum, _ in sizes], exchange.payload, 4)
    if exchange.sync_every is not None:
        itemsize = max(x.dtype.itemsize for x in jax.tree.leaves(params))
        in_float32 = exchange.outer is not None or exchange.averages_momentum
        of_dtype = 4 if in_float32 else itemsize
        averaged = [average for _, average in sizes]
        sent += exchange.averages_per_step * _bytes(
            averaged, exchange.average_payload, of_dtype
        )
    return sent / (4 * dense)


def sent_of(leaves: list[Leaf], exchange: "Exchange") -> list[tuple[int, int]]:
    """Elements of each leaf that are sent: of its momentum a step, and an average."""
    momenta, averaged = [0] * len(leaves), [leaf.size for leaf in leaves]
    if exchange.exchanges_momentum:
        selection = exchange.selection_for(leaves)
        momenta = [elements_sent(selection, leaf) for leaf in leaves]
    if exchange.in_turn:
        in_turn = exchange.average_selection(leaves)
        averaged = [elements_sent(in_turn, leaf) for leaf in leaves]
    return list(zip(momenta, averaged, strict=True))


def expected_loss(exchange: "Exchange") -> str:
    """What was recorded in this wire format, in a sentence."""
    payload = exchange.average_payload
    recorded = ABOVE_DENSE.get(payload) if isinstance(payload, str) else None
    if recorded is None or not exchange.averages_momentum:
        return "No loss is recorded for this exchange."
    losses = ", ".join(
        f"{abs(x):.1f} % {'below' if x < 0 else 'above'} ({on})"
        for on, x in recorded.items()
    )
    return (
        f"Expect, from benchmarks/frontier, where AdamW in {payload} ended beside "
        f"dense AdamW:\na loss {losses}, of a small language model."
    )


def check_share(share: object) -> None:
    """Raises unless it is in (0, 1]."""
    try:
        check_range("share", share, 0.0, 1.0, open_low=True)
    except ValueError as error:
        if isinstance(share, int | float) and 1 < share <= 100:
            error.add_note(f"{share} % is {share / 100}")
        raise


def _bytes(sizes: Sequence[int], payload: Payload, itemsize: int) -> float:
    """Bytes on the way to a mean, and as many back."""
    payload = resolve_payload(payload)
    if isinstance(payload, Quantizer):
        return slice_nbytes(sizes, payload, 1)
    return sum(sizes) * (itemsize if payload is None else jnp.dtype(payload).itemsize)
