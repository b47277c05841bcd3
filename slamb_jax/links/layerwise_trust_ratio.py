"""Trust ratios: each layer's step in proportion to its parameters, as LAMB's."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core import axes, checks
from slamb_jax._core.joining import (
    Joined,
    join_rows,
    spread_blocks,
    spread_over,
    spread_parts,
    sum_blocks,
    sum_parts,
)
from slamb_jax._core.leaves import Leaf, chosen, mask_tree, present, unless
from slamb_jax._core.moments import Form, Moments, add_decay, check_ratio, decay_at
from slamb_jax._core.recompute import recompute
from slamb_jax._core.rounding import next_step
from slamb_jax.exchange.collectives import psum_each
from slamb_jax.exchange.selections import AtStep, selection_at, unit_of_blocks
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.elementwise_rescale import freshness
from slamb_jax.links.on_shards import on_shards

Bounds = tuple[jax.Array, jax.Array]
Squares = tuple[jax.Array, jax.Array]  # squared norms of p and u, of each layer


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


class _Row(NamedTuple):
    """A leaf at one step, or several small ones that are joined."""

    leaf: Leaf
    p: jax.Array
    decays: bool
    u: jax.Array  # the update; or the first moment, of which the direction makes it
    nu: jax.Array | None  # the second moment
    of_mu: jax.Array | None  # the factor that corrects the bias of the first


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
        at = selection_at(self.exchange, params, step)
        if self.direction is None:
            moments = None  # they are those of the momentum in front
        elif moments is None:
            none = optax.EmptyState()
            updates, _ = self.direction.update(updates, none, params, **extra_args)
        decay = decay_at(self.weight_decay, state.count)
        of_nu = None if moments is None else moments.of_nu
        joined, rebuild = self._join(updates, params, moments, at)
        # 1. The squared norms of p and u, over each layer and all of its shards.
        inside = decay if self.form == "product" else None
        squares = [
            squared_norms(row.leaf, at, row.p, self._stepped(row, of_nu, inside))
            for row in joined.rows
        ]
        squares = psum_each(squares, [row.leaf.axes for row in joined.rows])
        # 2. Their ratios. 3. The step times its ratio. Of moments it is computed anew:
        # to keep it until the norms are there would take a copy of the parameters; and
        # so would ages of blocks that are elements.
        scaled, at = [], None if at is None else at._replace(step=recompute(at.step))
        for row, of_row in zip(joined.rows, squares, strict=True):
            if row.nu is not None:
                u, nu = recompute((row.u, row.nu))
                row = row._replace(u=u, nu=nu)
            stepped = self._stepped(row, of_nu, decay)
            scaled.append(self._factor(row.leaf, at, of_row) * stepped)
        new = LayerwiseTrustRatioState(unless(skip, state.count, step))
        return rebuild(joined.split(scaled)[0]), chosen(skip, new)

    def _join(
        self,
        updates: optax.Updates,
        params: optax.Params,
        moments: Moments | None,
        at: AtStep | None,
    ) -> tuple[Joined, Callable[[Sequence[Any]], Any]]:
        """The rows of this step, those of small leaves joined."""
        given = (updates, None, None) if moments is None else moments[:3]
        found, rebuild = present(
            updates, params, mask_tree(self.mask, params), *given,
            like=params, layout=self.exchange.layout,
        )  # fmt: skip
        rows = [_Row(leaf, *row) for leaf, _, *row in found]
        alone = axes.axis_size(self.exchange.axis_name) == 1

        def unit(leaf: Leaf) -> int | None:
            return None if alone else unit_of_blocks(at, leaf)

        return join_rows(rows, unit, same=["decays", "of_mu"]), rebuild

    def _stepped(
        self, row: _Row, of_nu: jax.Array | None, decay: jax.Array | None
    ) -> jax.Array:
        """The direction of a row, with decay, float32."""
        u = row.u.astype(jnp.float32)
        if self.direction and row.nu is not None and row.of_mu is not None:
            assert of_nu is not None
            hats = row.of_mu * u, of_nu * row.nu.astype(jnp.float32)
            given = {"second_moment": hats[1], "of_second_moment": of_nu}
            u, _ = self.direction.update(hats[0], optax.EmptyState(), None, **given)
        rate = decay if row.decays else None
        return add_decay(row.p.astype(jnp.float32), u.astype(jnp.float32), rate)

    def _factor(self, leaf: Leaf, at: AtStep | None, squares: Any) -> jax.Array:
        """The ratio of a row, as it multiplies the array."""
        age = None if at is None else at.age(leaf)
        if age is None:
            ratio = _ratio(*squares, otherwise=1.0)
            # The authors' product form leaves biases and scales unclipped.
            parts = leaf.parts or (leaf,)
            clips = [self.form == "sum" or len(x.layer_shape) > 1 for x in parts]
            clipped = jnp.clip(ratio, *self.bounds)
            if not all(clips):
                which = np.array(clips) if leaf.parts else clips[0]
                clipped = jnp.where(which, clipped, ratio)
            return spread_over(leaf, clipped)
        (p_fresh, u_fresh), (p_stale, u_stale) = squares
        fresh = _ratio(p_fresh, u_fresh, otherwise=1.0)
        stale = _ratio(p_stale, u_stale, otherwise=0.0 if self.form == "sum" else 1.0)
        if self.form == "sum":
            fresh = jnp.clip(fresh, *self.bounds)
            stale = jnp.minimum(stale, self.bounds[1])
        fresh, stale = (spread_parts(leaf, x, len(age)) for x in (fresh, stale))
        r = freshness(age, self.b3)
        if self.form == "product":
            factor = jnp.clip(r * fresh + (1 - r) * stale, *self.bounds)
        else:
            # elementwise_rescale multiplies by r + w, as it does in the product form.
            w = (1 - r) / axes.axis_size(self.exchange.axis_name) ** 0.5
            factor = (r * fresh + w * stale) / (r + w)
        return spread_blocks(leaf, factor)


def squared_norms(
    leaf: Leaf, at: AtStep | None, p: jax.Array, u: jax.Array
) -> Squares | tuple[Squares, Squares]:
    """Squared norms of p and u; of their fresh blocks, and of their stale ones."""
    squares = jnp.square(p.astype(jnp.float32)), jnp.square(u)
    age = None if at is None else at.age(leaf)
    if age is None:
        p, u = (sum_parts(leaf, x) for x in squares)
        return p, u
    masks = age == 0, age > 0
    if len(age) == leaf.size:
        # Blocks are elements. All sums in one: to mask first would be to keep copies.
        rows = -1, leaf.unit if leaf.parts else leaf.shape[-1]
        zero, pairs = jnp.float32(0), [(mask, x) for mask in masks for x in squares]
        masked = [jnp.where(m.reshape(rows), x.reshape(rows), zero) for m, x in pairs]
        of_rows = lax.reduce(masked, [zero] * 4, _add, (1,))
        sums = [sum_parts(leaf, x) for x in of_rows]
        return (sums[0], sums[1]), (sums[2], sums[3])
    blocks = [sum_blocks(x.reshape(len(age), -1)) for x in squares]

    def sum_where(mask: jax.Array) -> Squares:
        p, u = (sum_parts(leaf, jnp.where(mask, x, jnp.float32(0))) for x in blocks)
        return p, u

    return sum_where(masks[0]), sum_where(masks[1])


def _add(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _ratio(p: jax.Array, u: jax.Array, *, otherwise: float) -> jax.Array:
    """Root of p over u; ``otherwise`` where one of them is 0."""
    # In lax: tracing the ratios of many layers in jnp takes as long as compiling them.
    zero, other = jnp.float32(0), jnp.float32(otherwise)
    ratio = lax.div(lax.sqrt(p), lax.sqrt(u))
    if p.ndim:
        return jnp.where(lax.min(p, u) > zero, ratio, other)
    return lax.select(lax.gt(lax.min(p, u), zero), ratio, other)
