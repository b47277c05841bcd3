"""The seam of :func:`slamb_jax.mask_momentum`: a compressor that is not the library's.

A compressor is an optax transformation that gets the momentum x of a worker as its
updates. It returns :class:`slamb_jax.Sent`, the mean M of what all workers sent and
what this one did not; or, as ``optax.identity()`` does, one tree, M + e.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core.checks import check_transformation
from slamb_jax._core.leaves import arrays_of
from slamb_jax.compressors.codec import Sent
from slamb_jax.compressors.of_exchange import ByExchange
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links._mean_momentum import Row, Rule, ahead, memory, of_error


class Compressed(NamedTuple):
    """What a compressor made of the arrays of one step."""

    mean: list[jax.Array]  # M, or M + e where unsent is None
    unsent: list[jax.Array] | None
    state: optax.OptState

    @property
    def in_place(self) -> list[jax.Array]:
        """M + e: the momentum, with what is not sent in its place."""
        if self.unsent is None:
            return self.mean
        return [m + e for m, e in zip(self.mean, self.unsent, strict=True)]


Compress = Callable[[Sequence[jax.Array]], Compressed]


def as_compressor(
    compressor: optax.GradientTransformation | None, exchange: Exchange
) -> optax.GradientTransformationExtraArgs | None:
    """The compressor to call; None where the exchange itself sends."""
    if compressor is None:
        # Between averages of the parameters nothing is sent: that is a compressor, too.
        sends = exchange.averages_momentum or exchange.selection is not None
        return None if sends else optax.with_extra_args_support(optax.identity())
    check_transformation("compressor", compressor)
    # The link itself sends blocks in place, where a tree of M + e would be a copy. Its
    # residual would be a second memory.
    if isinstance(compressor, ByExchange):
        if compressor.exchange != exchange:
            raise ValueError(
                "compressor must have the exchange of mask_momentum, got "
                f"{compressor.exchange!r} for {exchange!r}"
            )
        return None
    return optax.with_extra_args_support(compressor)


def check_keeps_nothing(state: optax.OptState, params: optax.Params) -> None:
    """Raises for the state of a compressor that has a residual of its own."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(params)]
    treedef: Any = jax.tree.structure(params)

    def is_residual(x: Any) -> bool:
        leaves = jax.tree.leaves(x)
        return (
            jax.tree.structure(x) == treedef
            and [jnp.shape(leaf) for leaf in leaves] == shapes
            and all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)
        )

    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_residual)
    for path, x in flat if shapes else ():
        if is_residual(x):
            raise ValueError(
                f"compressor keeps state{jax.tree_util.keystr(path)}, a residual like "
                "the parameters. What is not sent waits in the momentum already, and "
                "would count twice: return slamb_jax.Sent(mean, unsent) and keep "
                "no residual; or put the compressor in front of an optimizer without "
                "mask_momentum"
            )


def compress(
    compressor: optax.GradientTransformationExtraArgs,
    rebuild: Callable[[Sequence[Any]], Any],
    updates: optax.Updates,
    like: Any,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
    arrays: Sequence[jax.Array],
) -> Compressed:
    """Calls a compressor on the arrays that have an update."""
    out, state = compressor.update(rebuild(arrays), state, params, **extra_args)

    def of_updates(tree: Any) -> list[jax.Array]:
        return arrays_of(updates, tree, like)

    if isinstance(out, Sent):
        return Compressed(of_updates(out.mean), of_updates(out.unsent), state)
    return Compressed(of_updates(out), None, state)


def exchanged_by(
    compress: Compress,
    rule: Rule,
    rows: Sequence[Row],
    step: jax.Array,
    *,
    agree: bool,
) -> tuple[list[jax.Array], list[jax.Array], optax.OptState]:
    """What the step takes, what the worker keeps, and the compressor's state.

    Where workers ``agree``, and the compressor tells M from e, the step takes M and e
    waits for the next x; otherwise the step takes M + e, and the worker keeps it.
    """
    has = [ahead(row, step, rule) for row in rows]
    out = compress([a.x for a in has])
    taken = out.mean if agree else out.in_place
    mus = []
    for i, (row, a) in enumerate(zip(rows, has, strict=True)):
        mu = memory(row, rule)  # as if all of x had been sent
        if agree and out.unsent is not None:
            mu = mu + of_error(out.unsent[i].astype(jnp.float32), row, a.fix)
        elif taken[i] is not a.x:  # optax.identity() leaves the momentum as it is
            mu = mu + rule.kept_share(row.b1) * (a.fix * (taken[i] - a.x))
        mus.append(mu.astype(row.m.dtype))
    return taken, mus, out.state
