"""Trust ratios: each layer's step in proportion to its parameters, as LAMB's."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core import axes, checks
from slamb_jax._core.joining import (
    join_rows,
    spread_blocks,
    spread_over,
    spread_parts,
    sum_parts,
)
from slamb_jax._core.leaves import (
    Leaf,
    bool_for_each,
    check_mask,
    chosen,
    next_step,
    present,
    unless,
)
from slamb_jax._core.recompute import recompute
from slamb_jax.exchange.collectives import psum_each
from slamb_jax.exchange.selections import AtStep, selection_at, unit_of_blocks
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.elementwise_rescale import freshness
from slamb_jax.links.mask_momentum import Moments
from slamb_jax.links.on_shards import on_shards

Form = Literal["sum", "product"]
Squares = tuple[jax.Array, jax.Array]  # squared norms of p and u, of each layer


class LayerwiseTrustRatioState(NamedTuple):
    """State of :func:`layerwise_trust_ratio`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


class _Row(NamedTuple):
    """A leaf at one step, or several small ones that are joined."""

    leaf: Leaf
    p: jax.Array
    decays: bool
    u: jax.Array  # the update; or the first moment, of which the direction makes it
    nu: jax.Array | None  # the second moment
    of_mu: jax.Array | None  # the factor that corrects the bias of the first


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
    check_decay(weight_decay, mask)
    checks.check_choice("form", form, ("sum", "product"))
    checks.check_range("c_min", c_min, 0.0)
    checks.check_range("c_max", c_max, checks.known(c_min) or 0.0)
    # As arrays, since optax.inject_hyperparams makes them arrays of its own dtype.
    bounds = jnp.asarray(c_min, jnp.float32), jnp.asarray(c_max, jnp.float32)
    inner = None
    if direction is not None:
        checks.check_transformation("direction", direction)
        inner = optax.with_extra_args_support(direction)

    def init(params: optax.Params) -> LayerwiseTrustRatioState:
        checks.check_real(params, "params")
        # Of shapes alone: nothing is allocated to look.
        if inner and jax.tree.leaves(jax.eval_shape(inner.init, params)):
            raise ValueError(
                "direction must have no state, since it is computed more than once: "
                f"put it in front of layerwise_trust_ratio, got {direction!r}"
            )
        return LayerwiseTrustRatioState(jnp.zeros([], jnp.int32))

    def step_along(
        row: _Row, of_nu: jax.Array | None, decay: jax.Array | None
    ) -> jax.Array:
        """The direction of a row, with decay, float32."""
        u = row.u.astype(jnp.float32)
        if inner and row.nu is not None and row.of_mu is not None:
            assert of_nu is not None
            # The direction's own arguments, as mask_momentum would pass them.
            hats = row.of_mu * u, of_nu * row.nu
            given = {"second_moment": hats[1], "of_second_moment": of_nu}
            u, _ = inner.update(hats[0], optax.EmptyState(), None, **given)
        u = u.astype(jnp.float32)
        # Decay is added in float32: in 16 bits it would be lost beside a larger u.
        if decay is None or not row.decays:
            return u
        return u + decay * row.p.astype(jnp.float32)

    def factor_of(leaf: Leaf, at: AtStep | None, squares: Any) -> jax.Array:
        """The ratio of a row, as it multiplies the array."""
        age = None if at is None else at.age(leaf)
        if age is None:
            ratio = _ratio(*squares, otherwise=1.0)
            # The authors' product form leaves biases and scales unclipped.
            parts = leaf.parts or (leaf,)
            clips = [form == "sum" or len(x.layer_shape) > 1 for x in parts]
            which = np.array(clips) if leaf.parts else clips[0]
            clipped = jnp.where(which, jnp.clip(ratio, *bounds), ratio)
            return spread_over(leaf, clipped)
        (p_fresh, u_fresh), (p_stale, u_stale) = squares
        fresh = _ratio(p_fresh, u_fresh, otherwise=1.0)
        stale = _ratio(p_stale, u_stale, otherwise=0.0 if form == "sum" else 1.0)
        if form == "sum":  # the product form clips what comes out
            fresh = jnp.clip(fresh, *bounds)
            stale = jnp.minimum(stale, bounds[1])
        # Both ratios are of a layer, and its blocks differ in how fresh they are.
        fresh, stale = (spread_parts(leaf, x, len(age)) for x in (fresh, stale))
        r = freshness(age, b3)
        if form == "product":
            factor = jnp.clip(r * fresh + (1 - r) * stale, *bounds)
        else:
            # elementwise_rescale multiplies by r + w, as it does in the product form.
            w = (1 - r) / axes.axis_size(exchange.axis_name) ** 0.5
            factor = (r * fresh + w * stale) / (r + w)
        return spread_blocks(leaf, factor)

    def update(
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
        at = selection_at(exchange, params, step)
        if inner is None:
            moments = None  # they are those of the momentum in front
        elif moments is None:
            updates, _ = inner.update(updates, optax.EmptyState(), params, **extra_args)
        decay = decay_at(weight_decay, state.count)
        of_nu = None if moments is None else moments.of_nu
        # 1. The rows of this step, those of small leaves joined.
        given = (updates, None, None) if moments is None else moments[:3]
        found, rebuild = present(
            updates, params, bool_for_each("mask", mask, params), *given,
            like=params, layout=exchange.layout,
        )  # fmt: skip
        alone = axes.axis_size(exchange.axis_name) == 1
        joined = join_rows(
            [_Row(leaf, *row) for leaf, _, *row in found],
            lambda leaf: None if alone else unit_of_blocks(at, leaf),
            same=["decays", "of_mu"],
        )
        # 2. The squared norms of p and u, over each layer and all of its shards. Those
        # of the sum form are without decay, as the authors have it.
        inside = decay if form == "product" else None
        squares = [
            squared_norms(row.leaf, at, row.p, step_along(row, of_nu, inside))
            for row in joined.rows
        ]
        squares = psum_each(squares, [row.leaf.axes for row in joined.rows])
        # 3. Their ratios, and the step times its ratio. Of moments the step is computed
        # anew: to keep it until the norms are there would take a copy of the
        # parameters; and so would ages of blocks that are elements.
        scaled, at = [], None if at is None else at._replace(step=recompute(at.step))
        for row, of_row in zip(joined.rows, squares, strict=True):
            if row.nu is not None:
                u, nu = recompute((row.u, row.nu))
                row = row._replace(u=u, nu=nu)
            factor = factor_of(row.leaf, at, of_row)
            scaled.append(factor * step_along(row, of_nu, decay))
        new = LayerwiseTrustRatioState(unless(skip, state.count, step))
        return rebuild(joined.split(scaled)[0]), chosen(skip, new)

    return on_shards(optax.GradientTransformationExtraArgs(init, update), exchange)


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
    zero = jnp.float32(0)
    # All sums in one reduction: for a single one XLA would keep a copy of its squares.
    add = functools.partial(jax.tree.map, lax.add)
    if len(age) == leaf.size:  # blocks are elements
        rows = -1, leaf.unit if leaf.parts else leaf.shape[-1]
        p_u = [x.reshape(rows) for x in squares]
        masked = [jnp.where(m.reshape(rows), x, zero) for m in masks for x in p_u]
        sums = lax.reduce(masked, [zero] * 4, add, (1,))
    else:
        # A mask of whole blocks is cheaper to apply to their sums.
        p_u = [x.reshape(len(age), -1) for x in squares]
        blocks = lax.reduce(p_u, [zero] * 2, add, (1,))
        sums = [jnp.where(m[:, 0], x, zero) for m in masks for x in blocks]
    p_fresh, u_fresh, p_stale, u_stale = (sum_parts(leaf, x) for x in sums)
    return (p_fresh, u_fresh), (p_stale, u_stale)


def _ratio(p: jax.Array, u: jax.Array, *, otherwise: float) -> jax.Array:
    """Root of p over u; ``otherwise`` where one of them is 0."""
    # Roots first: the quotient of the squares overflows sooner.
    ratio = lax.sqrt(p) / lax.sqrt(u)
    return jnp.where(lax.min(p, u) > 0, ratio, jnp.float32(otherwise))


def check_decay(weight_decay: Any, mask: Any) -> None:
    """Raises for a decay that is negative, and for a mask that is not of bools."""
    checks.check_range("weight_decay", weight_decay, 0.0, schedule=True)
    check_mask("mask", mask)


def decay_at(
    weight_decay: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array | None:
    """The decay at a step counted from 0; None where it is the constant 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return None
    decay = weight_decay(count) if callable(weight_decay) else weight_decay
    return jnp.asarray(decay, jnp.float32)
