"""Random-k compression of what the workers exchange, with error feedback."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes
from slamb_jax._checks import check_apart, check_floating
from slamb_jax._collectives import narrowed
from slamb_jax._exchange import Route, exchange, means_of
from slamb_jax._layout import make_layout
from slamb_jax._leaves import flatten_numbered, present
from slamb_jax._quantize import Payload, check_payload
from slamb_jax._selections import (
    Kept,
    Rows,
    Selection,
    Strided,
    TopK,
    by_phase,
    check_selection,
    chosen_now,
    kept_at_first,
    learned,
    rows_at,
)


class RandkCompressState(NamedTuple):
    """State of :func:`randk_compress_with_error_feedback`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    residual: optax.Updates | None  # float32, as updates; None if nothing is kept
    chosen: Kept = None  # of a TopK, for each leaf: what it chooses by


def randk_compress_with_error_feedback(
    selection: Selection = Strided(),  # noqa: B008 (frozen)
    *,
    axis_name: _axes.AxisName | None = None,
    local_axis_name: _axes.AxisName | None = None,
    payload: Payload = None,
    keep_residual: bool = True,
    param_specs: Any = None,
    stacked: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages a chosen share of the updates over the workers; the rest waits.

    With :math:`M_t` the coordinates that ``selection`` chooses at step t:

    .. math::

      x &= g + e \\
      u[M_t] &= \text{mean over workers of } x[M_t], \quad u[\neg M_t] = 0 \\
      e &= x - (\text{what this worker sent})

    which is classical error feedback and goes in front of any optimizer. With
    ``keep_residual=False`` there is no :math:`e` and the rest passes through,
    :math:`u[\neg M_t] = g[\neg M_t]`: that is how :func:`slamb_jax.mask_momentum`
    uses it, whose momentum is the memory. Only the chosen share travels, no indices:
    every worker knows :math:`M_t`.

    Args:
      selection: which coordinates travel when, see :class:`slamb_jax.Selection`.
      axis_name: the mesh axis (or axes) of the workers; None for a single one, which
        keeps the masks and exchanges nothing.
      local_axis_name: the mesh axis (or axes) of the devices within a worker, if it is
        a group of several; their updates must be the same, see
        :func:`average_gradients`. Each exchanges a slice for the group.
      payload: what travels: None for the dtype of the updates, ``"bfloat16"``,
        ``"float16"``, or codes of :class:`StochasticUniform` or
        :class:`NaturalCompression`.
      keep_residual: hold what was not sent in a residual, which is added at the next
        step. If False it passes through, and a residual is kept of what rounding took
        only, and only of a quantizer with ``error_feedback``:
        :math:`x[M_t] = (g + e)[M_t]`, :math:`e[M_t] = (x - Q(x))[M_t]`.
      param_specs: how the parameters are cut, as in :func:`slamb_jax.slamb`.
      stacked: which leaves are stacks of layers, as in :func:`slamb_jax.slamb`.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`. A residual is float32 and also
      keeps what rounding took: of what the worker sent, and with a quantizer of the
      means that it rounded for all, n times, since it sends an nth of the next.

    Raises:
      ValueError: in ``update``, if ``axis_name`` is not bound, or if the updates were
        averaged already and the types show it (``shard_map`` with ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> tx = optax.chain(
      ...     slamb_jax.randk_compress_with_error_feedback(
      ...         slamb_jax.Strided(compress_ratio=0.5, min_size=0)
      ...     ),
      ...     optax.sgd(1.0),
      ... )
      >>> params = jnp.ones((2, 2))
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.ones((2, 2)), state, params)
      ...     print((updates != 0).sum())
      2
      2

    References:
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023; Stich et al.,
      `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.
    """
    check_selection(selection)
    check_apart(axis_name, local_axis_name)
    route = Route(axis_name, local_axis_name, check_payload("payload", payload))
    layout = make_layout(param_specs, stacked, axis_name)
    holds = keep_residual or route.feeds_back
    if isinstance(selection, TopK) and param_specs is not None:
        raise ValueError(
            f"selection={selection!r} and param_specs cannot both be given: what a "
            "TopK keeps is of the rows of whole leaves. Take a round robin."
        )

    def init(params: optax.Params) -> RandkCompressState:
        check_floating(params, "params")
        residual = None
        if holds:
            residual = optax.tree.zeros_like(params, dtype=jnp.float32)
        kept: Kept = None
        if isinstance(selection, TopK):  # the others need not know of shards here
            leaves = [leaf for leaf, *_ in present(params, layout=layout)[0]]
            kept = kept_at_first(selection, leaves)
        return RandkCompressState(jnp.zeros([], jnp.int32), residual, kept)

    def update(
        updates: optax.Updates,
        state: RandkCompressState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, RandkCompressState]:
        del extra_args
        _axes.check_local(updates, axis_name)
        step = optax.safe_increment(state.count)
        leaves, gs, treedef = flatten_numbered(updates, params, layout)
        there = [(i, leaf) for i, leaf in enumerate(leaves) if leaf is not None]
        here = [i for i, _ in there]
        if state.chosen is not None and params is None and len(here) < len(leaves):
            raise ValueError(
                "params must be given where gradients are None and the selection is a "
                "TopK: without them nothing tells which leaf a number is of"
            )
        es = treedef.flatten_up_to(state.residual) if holds else None

        numbered = [leaf for _, leaf in there]
        chosen = chosen_now(selection, state.chosen, numbered)

        def exchanged(selection: Selection) -> tuple[Any, ...]:
            rows = [rows_at(selection, step, leaf) for _, leaf in there]
            if es is None:
                packed = [r.pack(gs[i]) for i, r in zip(here, rows, strict=True)]
                means = means_of(packed, route, step)
                return _put(gs, here, rows, means), None, learn(selection, means)
            wide = {i: gs[i].astype(jnp.float32) for i in here}
            xs = [r.pack(wide[i] + es[i]) for i, r in zip(here, rows, strict=True)]
            packed = [narrowed(x, gs[i].dtype) for i, x in zip(here, xs, strict=True)]
            found = exchange(packed, route, step)
            left = [x - sent for x, sent in zip(xs, found.sent, strict=True)]
            if found.owed is not None:
                left = [x + owed for x, owed in zip(left, found.owed, strict=True)]
            us, rest = list(gs), list(es)
            if keep_residual:  # what is not chosen waits too, and does not pass through
                us = [None if g is None else jnp.zeros_like(g) for g in gs]
                for i in here:
                    rest[i] = wide[i] + es[i]
            kept = learn(selection, found.means)
            return (
                _put(us, here, rows, found.means),
                _put(rest, here, rows, left),
                kept,
            )

        def learn(selection: Selection, means: Any) -> Kept:
            return learned(
                state.chosen, selection, numbered, means, added_up=keep_residual
            )

        us, es, kept = by_phase(chosen, step, exchanged)
        residual = None if es is None else treedef.unflatten(es)
        return treedef.unflatten(us), RandkCompressState(step, residual, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def _put(
    into: Sequence[Any],
    places: Sequence[int],
    rows: Sequence[Rows],
    packed: Sequence[jax.Array],
) -> list[Any]:
    """``into`` with these rows of these places replaced."""
    out = list(into)
    for i, r, x in zip(places, rows, packed, strict=True):
        out[i] = r.unpack(x, out[i])
    return out
