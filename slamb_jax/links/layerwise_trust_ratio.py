"""Trust ratios: each layer's step in proportion to its parameters, as LAMB's."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core import axes, checks
from slamb_jax._core.leaves import (
    Leaf,
    broadcast_blocks,
    chosen,
    mask_tree,
    present,
    unless,
)
from slamb_jax._core.moments import Form, Moments, add_decay, check_ratio, decay_at
from slamb_jax._core.rounding import next_step
from slamb_jax.exchange.blocks import AtStep, selection_at
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links._norms import Term, flat_term, squares_of_leaves, term_of_moments
from slamb_jax.links.elementwise_rescale import freshness
from slamb_jax.links.on_shards import on_shards

Bounds = tuple[jax.Array, jax.Array]


class LayerwiseTrustRatioState(NamedTuple):
    """State of :func:`layerwise_trust_ratio`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def layerwise_trust_ratio(
    exchange: Exchange,
    direction: optax.GradientTransformation | None = None,
    *,
    b3: ArrayLike = 1.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: Form = "sum",
    c_min: ArrayLike = 0.01,
    c_max: ArrayLike = 1000.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each layer's update to the norm of its parameters, as LAMB does.

    With parameters p, direction u and decay :math:`\lambda`, in the **sum form**

    .. math::

      u \leftarrow \phi\,(u + \lambda p), \quad
      \phi = \operatorname{clip}(\|p\| / \|u\|, c_{min}, c_{max})

    and in the **product form**, whose norms are with decay, as in ``optax.lamb``,

    .. math::

      u \leftarrow u + \lambda p, \quad
      u \leftarrow \operatorname{clip}(\|p\| / \|u\|, c_{min}, c_{max})\,u

    where the ratio is 1 if one of its norms is 0, and that of a leaf of one dimension
    or none is not clipped in the product form.

    With a ``selection`` in the exchange there are two ratios: :math:`\phi_{hi}` of the
    coordinates exchanged at this step, whose momentum is that of all workers, and
    :math:`\phi_{lo}` of the others. With the freshness :math:`r = \beta_3^\tau` of a
    coordinate exchanged :math:`\tau` steps ago, and :math:`w = (1-r)/\sqrt n`,

    .. math::

      \phi = \frac{r\,\phi_{hi} + w\,\phi_{lo}}{r + w}
      \quad\text{(sum)}, \qquad
      \phi = \operatorname{clip}(r\,\phi_{hi} + (1-r)\,\phi_{lo}, c_{min}, c_{max})
      \quad\text{(product)}

    In the sum form :math:`\phi_{hi}` is clipped, and :math:`\phi_{lo}` from above; a
    :math:`\phi_{lo}` with a norm of 0 is 0. :func:`elementwise_rescale` behind it
    multiplies by :math:`r + w`. A leaf that is exchanged whole has one ratio.

    Use it by itself behind any direction, for large batches: ``optax.chain(
    optax.scale_by_adam(), layerwise_trust_ratio(Exchange()), ...)`` is LAMB with a
    ratio for each layer of a stack, and the norms of whole layers where these are
    sharded, neither of which ``optax.scale_by_trust_ratio`` has.

    Args:
      exchange: its ``selection`` says which coordinates are fresh. Norms are summed
        over the mesh axes of its ``param_specs``; each layer of a leaf in ``stacked``
        has its own ratios.
      direction: what is done with the updates first: a transformation that has no
        state and works element by element, such as :func:`slamb_jax.directions.adam`.
        As the direction of :func:`mask_momentum` with a selection, this link computes
        it once for the norms and once for the step, and keeps no copy of it in memory.
        None: the updates themselves.
      b3: decay rate of a coordinate's freshness per step, in [0, 1]. 1: all count as
        fresh.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.add_decayed_weights``: a tree of bools
        with the structure of the parameters or a prefix of it, or a function of the
        parameters that returns one. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the ratio, not negative.
      c_max: upper bound of the ratio, at least ``c_min``; may be infinite.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``. Norms and
      updates are float32.

    Raises:
      ValueError: for a value out of range, and for a direction with a state; in
        ``update``, without ``params``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.layerwise_trust_ratio(slamb_jax.Exchange())
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
      >>> print(updates)
      [5. 0.]

    References:
      You et al., `Large Batch Optimization for Deep Learning
      <https://arxiv.org/abs/1904.00962>`_, 2019; Xu et al., `SLAMB
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023, section 3: ratios of
      fresh and stale coordinates. The two forms are those of the authors' two
      optimizers.
    """
    check_exchange(exchange)
    checks.check_range("b3", b3, 0.0, 1.0, holds=checks.NEAR_ONE)
    check_ratio(weight_decay, mask, form, c_min, c_max)
    # As arrays, since optax.inject_hyperparams makes them arrays of its own dtype.
    bounds = jnp.asarray(c_min, jnp.float32), jnp.asarray(c_max, jnp.float32)
    inner = None
    if direction is not None:
        checks.check_transformation("direction", direction)
        inner = optax.with_extra_args_support(direction)
    link = _Link(exchange, inner, b3, weight_decay, mask, form, bounds)
    tx = optax.GradientTransformationExtraArgs(link.init, link.update)
    return on_shards(tx, exchange)


class _Link(NamedTuple):
    """The settings of one link, and its two functions."""

    exchange: Exchange
    direction: optax.GradientTransformationExtraArgs | None
    b3: ArrayLike
    weight_decay: optax.ScalarOrSchedule
    mask: Any
    form: Form
    bounds: Bounds

    def init(self, params: optax.Params) -> LayerwiseTrustRatioState:
        checks.check_real(params, "params")
        direction = self.direction  # of shapes alone: nothing is allocated to look
        if direction and jax.tree.leaves(jax.eval_shape(direction.init, params)):
            raise ValueError(
                "direction must have no state, since it is computed for parts of a "
                f"leaf and more than once, got {direction!r}: put it in front of "
                "layerwise_trust_ratio, in a chain"
            )
        return LayerwiseTrustRatioState(jnp.zeros([], jnp.int32))

    def update(
        self,
        updates: optax.Updates,
        state: LayerwiseTrustRatioState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        *,
        moments: Moments | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LayerwiseTrustRatioState]:
        checks.check_params(params)
        checks.check_real(updates, "updates")
        checks.check_real(params, "params")
        step = next_step(state.count)
        decay = decay_at(self.weight_decay, state.count)
        at_step = None
        if self.exchange.selection is not None:
            at_step = selection_at(self.exchange, params, step)
        if self.direction is None:
            moments = None  # they are those of the momentum in front
        elif moments is None:
            none = optax.EmptyState()
            updates, _ = self.direction.update(updates, none, params, **extra_args)
        rows, rebuild = present(
            updates, params, mask_tree(self.mask, params), *(moments or ())[:3],
            like=params, layout=self.exchange.layout,
        )  # fmt: skip
        # A decay that follows a schedule is a number of this step; None is no decay at
        # all, for which nothing is added to the program.
        of_nu = None if moments is None else moments.of_nu
        rates = [decay if decays else None for _, _, _, decays, *_ in rows]
        pairs = zip(rows, rates, strict=True)
        terms = [self._term(at_step, of_nu, rate, *row) for row, rate in pairs]
        ratios = _trust_ratios(terms, at_step, self.form, self.bounds)
        triples = zip(terms, ratios, rates, strict=True)
        new = LayerwiseTrustRatioState(unless(skip, state.count, step))
        return rebuild([self._scaled(*x) for x in triples]), chosen(skip, new)

    def _term(
        self,
        at_step: AtStep | None,
        of_nu: jax.Array | None,
        decay: jax.Array | None,
        leaf: Leaf,
        u: jax.Array,
        p: jax.Array,
        _: bool,
        *given: jax.Array,
    ) -> Term:
        """What the norms of a leaf are of."""
        age = None if at_step is None else at_step.age(leaf)
        inside = decay if self.form == "product" else None
        p = p.astype(jnp.float32)
        if self.direction is None or of_nu is None:
            return flat_term(leaf, age, p, u.astype(jnp.float32), inside)
        m, v, of_m = given
        scalars = of_m, of_nu
        direction = functools.partial(_direction, self.direction)
        return term_of_moments(leaf, age, p, (m, v), scalars, direction, inside)

    def _scaled(
        self, term: Term, ratios: "_Ratios", decay: jax.Array | None
    ) -> jax.Array:
        """The direction times its ratio, with decay."""
        factor = ratios.fresh
        if term.age is not None:
            r = freshness(term.age, self.b3, term.leaf)
            n = axes.axis_size(self.exchange.axis_name)
            factor = ratios.blend(self.form, r, n, self.bounds)
        u, factor = term.recompute(factor)
        return _over_leaf(factor, term) * add_decay(term.p, u, decay)


def _direction(
    inner: optax.GradientTransformationExtraArgs,
    scalars: tuple[jax.Array, ...],
    m: jax.Array,
    v: jax.Array,
) -> jax.Array:
    """The direction of a leaf, or of blocks of it, from its moments."""
    # The scalars are arguments, so that a barrier can hold them with the moments: what
    # is outside of it would be computed for all leaves of one shape, and kept.
    of_m, of_v = scalars
    m_hat, v_hat = of_m * m.astype(jnp.float32), of_v * v.astype(jnp.float32)
    given = {"second_moment": v_hat, "of_second_moment": of_v}
    u, _ = inner.update(m_hat, optax.EmptyState(), None, **given)
    return u.astype(jnp.float32)


class _Ratios(NamedTuple):
    """Trust ratios of a layer: one for fresh coordinates, one for stale ones.

    In a stack of layers there is one per block, (blocks, 1), or one per layer if the
    leaf is dense.
    """

    fresh: jax.Array
    stale: jax.Array | None  # None for a dense leaf

    def blend(self, form: Form, r: jax.Array, n: int, bounds: Bounds) -> jax.Array:
        """Their mean by freshness, one per block."""
        assert self.stale is not None
        if form == "product":
            return jnp.clip(r * self.fresh + (1 - r) * self.stale, *bounds)
        # elementwise_rescale multiplies by r + w, as it does in the product form.
        w = (1 - r) / n**0.5
        return (r * self.fresh + w * self.stale) / (r + w)


def _trust_ratios(
    terms: Sequence[Term], at_step: AtStep | None, form: Form, bounds: Bounds
) -> list[_Ratios]:
    """The ratios of all leaves, clipped where the form does."""
    out = []
    for term, squares in zip(terms, squares_of_leaves(terms, at_step), strict=True):
        if term.age is None:
            ratio = _ratio(*squares, otherwise=1.0)
            # The authors' product form leaves biases and scales unclipped.
            if form == "sum" or len(term.leaf.layer_shape) > 1:
                ratio = jnp.clip(ratio, *bounds)
            out.append(_Ratios(ratio, None))
            continue
        exchanged, others = (
            tuple(_per_block(x, term.leaf, len(term.age)) for x in part)
            for part in squares
        )
        fresh = _ratio(*exchanged, otherwise=1.0)
        if form == "sum":
            fresh = jnp.clip(fresh, *bounds)
            stale = jnp.minimum(_ratio(*others, otherwise=0.0), bounds[1])
        else:
            stale = _ratio(*others, otherwise=1.0)
        out.append(_Ratios(fresh, stale))
    return out


def _ratio(p: jax.Array, u: jax.Array, *, otherwise: float) -> jax.Array:
    """Root of p over u; ``otherwise`` where one of them is 0."""
    # In lax: tracing the ratios of many layers in jnp takes as long as compiling them.
    zero, other = jnp.float32(0), jnp.float32(otherwise)
    ratio = lax.div(lax.sqrt(p), lax.sqrt(u))
    if p.ndim:
        return jnp.where(lax.min(p, u) > zero, ratio, other)
    return lax.select(lax.gt(lax.min(p, u), zero), ratio, other)


def _per_block(x: jax.Array, leaf: Leaf, blocks: int) -> jax.Array:
    """One value per layer of a stack as one per block; a single layer's as it is."""
    if not leaf.stacked:
        return x
    per_layer = (leaf.layers, blocks // leaf.layers)
    return jnp.broadcast_to(x[:, None], per_layer).reshape(-1, 1)


def _over_leaf(factor: jax.Array, term: Term) -> jax.Array:
    """A factor as it multiplies the leaf: per block, per layer of a stack, or one."""
    if term.age is not None:
        return broadcast_blocks(factor, term.leaf)
    if not term.leaf.stacked:
        return factor
    # Not through blocks: a reshape would gather a leaf on a mesh with explicit axes.
    return factor.reshape(-1, *(1,) * (len(term.leaf.shape) - 1))
