r"""The momentum of workers that step by themselves: a selection of it is exchanged.

With x what a worker has, M the mean of what all sent of the selected coordinates, and e
what this worker did not send, the step takes M + e and the worker keeps
:math:`m \leftarrow M + e`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core.leaves import unless
from slamb_jax._core.moments import moved
from slamb_jax._core.platform import computed_once_on_tpu
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links._mean_momentum import Row, SecondMoment

Send: TypeAlias = Callable[[list[jax.Array]], list[jax.Array]]


class Moments(NamedTuple):
    """Two moments as they lie in memory, and the factors that correct their bias.

    :func:`mask_momentum` hands them to its direction as the argument ``moments``, so
    that :func:`layerwise_trust_ratio` can compute a direction twice in place of keeping
    it.
    """

    mu: optax.Updates
    nu: optax.Updates
    of_mu: optax.Updates  # a factor for each leaf, whose b1 may be its own
    of_nu: jax.Array


def selected(
    exchange: Exchange,
    rows: Sequence[Row],
    send: Send,
    skip: jax.Array | None,
) -> list[jax.Array]:
    """The momentum of each leaf after this step's gradient and its exchange.

    ``send`` puts M + e in the place of what is selected. With ``overlap`` it gets what
    the last step left, so that it need not wait for the gradient.
    """
    old = [row.m for row in rows]

    def grown(ms: list[jax.Array]) -> Any:
        new = [
            moved(m, row.g, row.b1).astype(m.dtype)
            for row, m in zip(rows, ms, strict=True)
        ]
        return unless(skip, ms, new)

    return grown(send(old)) if exchange.overlap else send(grown(old))


def second_moment(
    second: SecondMoment,
    rows: Sequence[Row],
    step: jax.Array,
    skip: jax.Array | None,
) -> SecondMoment:
    """V with the squares of the worker's own gradient, which nobody sends."""
    gs = [row.g.astype(jnp.float32) for row in rows]
    second = second.after(gs, [row.leaf for row in rows], step, skip)
    if skip is not None:  # a TPU keeps more after a barrier
        return second
    return second._replace(nus=list(map(computed_once_on_tpu, second.nus)))
