"""LAMB's trust ratio, for the fresh and for the stale part of a layer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _collectives
from slamb_jax._checks import (
    check_axis_name,
    check_choice,
    check_clips,
    check_params,
    check_range,
)
from slamb_jax._leaves import Leaf, map_numbered
from slamb_jax._momentum import FORMS
from slamb_jax._rescale import freshness
from slamb_jax._selections import Selection, Strided, check_selection


class LayerwiseTrustRatioState(NamedTuple):
    """State of :func:`layerwise_trust_ratio`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def layerwise_trust_ratio(
    selection: Selection = Strided(),  # noqa: B008 (frozen)
    b3: Any = 0.99,
    *,
    axis_name: _collectives.AxisName | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: str = "sum",
    c_min: Any = 0.01,
    c_max: Any = 1000.0,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB's trust ratio, one for what was exchanged and one for the rest.

    For each leaf with parameters p, direction u and mask M, decay :math:`\lambda`:

    **Product form.** Decay is inside the norms, :math:`u \leftarrow u + \lambda p`,

    .. math::

      \phi_{hi} = \frac{\|p[M]\|}{\|u[M]\|},\quad
      \phi_{lo} = \frac{\|p[\neg M]\|}{\|u[\neg M]\|},\quad
      u \leftarrow \operatorname{clip}(r\phi_{hi} + (1-r)\phi_{lo}, c_{min}, c_{max})\,u

    each ratio 1 where one of its norms is 0. A leaf of one dimension or none has
    :math:`u \leftarrow (\|p\|/\|u\|)\,u`, not clipped.

    **Sum form.** The ratios are taken before decay is added, :math:`\phi_{hi}` (1 for a
    norm of 0) clipped to :math:`[c_{min}, c_{max}]` and :math:`\phi_{lo}` (0 for a norm
    of 0) to :math:`[0, c_{max}]`, and with :math:`w = (1-r)/\sqrt n`

    .. math:: u \leftarrow \frac{r\phi_{hi} + w\phi_{lo}}{r + w} (u + \lambda p)

    so that :func:`elementwise_rescale`, which multiplies by r + w, completes the
    published sum :math:`(r\phi_{hi} + w\phi_{lo})(u + \lambda p)`.

    Args:
      selection: the one that chose what was exchanged.
      b3: decay rate of the freshness :math:`r = \beta_3^\tau`, in [0, 1].
      axis_name: the mesh axis (or axes) of the workers, for n; None is n = 1.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.add_decayed_weights``: a tree of bools
        with the structure of the parameters or a prefix of it, or a function of the
        parameters that gives one. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the ratio, not negative.
      c_max: upper bound of the ratio, at least ``c_min``; may be infinite.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``. Norms are
      those of the whole leaf, in float32.

    Raises:
      ValueError: for a value out of range, and in ``update`` without ``params``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.layerwise_trust_ratio(form="product")
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
      >>> print(updates)
      [5. 0.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023;
      You et al., `Large Batch Optimization for Deep Learning
      <https://arxiv.org/abs/1904.00962>`_, 2019.
    """
    check_selection(selection)
    check_range("b3", b3, 0.0, 1.0)
    check_axis_name(axis_name)
    check_range("weight_decay", weight_decay, 0.0)
    check_choice("form", form, FORMS)
    check_clips(c_min, c_max)

    def init(params: optax.Params) -> LayerwiseTrustRatioState:
        del params
        return LayerwiseTrustRatioState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: LayerwiseTrustRatioState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LayerwiseTrustRatioState]:
        del extra_args
        check_params(params)
        step = optax.safe_increment(state.count)
        n = _collectives.axis_size(axis_name)
        decay = weight_decay(state.count) if callable(weight_decay) else weight_decay
        low, high, decay = (jnp.asarray(x, jnp.float32) for x in (c_min, c_max, decay))

        def scale(leaf: Leaf, u: jax.Array, p: jax.Array, decays: bool) -> jax.Array:
            if not leaf.size:
                return u
            p32, u32 = p.astype(jnp.float32), u.astype(jnp.float32)
            decayed = u32 + decay * p32 if decays else u32
            normed = decayed if form == "product" else u32
            clipped = form == "sum" or len(leaf.shape) > 1
            if selection.whole(leaf):
                ratio = _ratio(_square(p32), _square(normed), otherwise=1.0)
                ratio = jnp.clip(ratio, low, high) if clipped else ratio
                return (ratio * decayed).astype(u.dtype)

            squares = _squares(selection, step, leaf, p32, normed)
            (p_sent, u_sent), (p_kept, u_kept) = squares
            fresh = _ratio(p_sent, u_sent, otherwise=1.0)
            r = freshness(selection, step, leaf, b3)
            if form == "product":
                stale = _ratio(p_kept, u_kept, otherwise=1.0)
                ratio = jnp.clip(r * fresh + (1 - r) * stale, low, high)
            else:
                stale = jnp.minimum(_ratio(p_kept, u_kept, otherwise=0.0), high)
                w = (1 - r) / n**0.5
                ratio = (r * jnp.clip(fresh, low, high) + w * stale) / (r + w)
            rows = decayed.reshape(ratio.shape[0], -1)
            return (ratio * rows).astype(u.dtype).reshape(u.shape)

        decays = _decay_mask(mask, params)
        u = map_numbered(scale, updates, params, decays, like=params)
        return u, LayerwiseTrustRatioState(step)

    return optax.GradientTransformationExtraArgs(init, update)


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x))


def _squares(
    selection: Selection, step: jax.Array, leaf: Leaf, *arrays: jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Squared norms of what is sent of each array at this step, and of what is not.

    The latter are the differences to the whole, whose sum is one vectorized pass where
    a masked one is not, unless so much was sent that digits would be lost.
    """
    whole = [_square(x) for x in arrays]
    sent = [_square(selection.pack(step, leaf, x)) for x in arrays]

    def masked(*arrays: jax.Array) -> list[jax.Array]:
        chosen = selection.mask(step, leaf)
        rows = [x.reshape(chosen.shape[0], -1) for x in arrays]
        return [_square(jnp.where(chosen, jnp.zeros_like(x), x)) for x in rows]

    def difference(*arrays: jax.Array) -> list[jax.Array]:
        del arrays
        return [w - s for w, s in zip(whole, sent, strict=True)]

    safe = [s < 0.75 * w for w, s in zip(whole, sent, strict=True)]
    all_safe = functools.reduce(jnp.logical_and, safe)
    return sent, _collectives.cond(all_safe, difference, masked, *arrays)


def _ratio(p: jax.Array, u: jax.Array, *, otherwise: float) -> jax.Array:
    """Root of p over u; ``otherwise`` where one of them is 0."""
    defined = (p > 0) & (u > 0)
    return jnp.where(
        defined, jnp.sqrt(p) / jnp.sqrt(jnp.where(defined, u, 1)), otherwise
    )


def _decay_mask(mask: Any, params: optax.Params) -> optax.Params:
    """The user's mask (a tree, a prefix or a function) as one bool per parameter."""
    tree = mask(params) if callable(mask) else True if mask is None else mask
    for path, m in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(m, bool) and getattr(m, "dtype", None) != jnp.dtype(bool):
            where = f"mask{jax.tree_util.keystr(path)}"
            raise ValueError(f"mask must have bools for leaves, got {m!r} at {where}")
    try:
        return jax.tree.map(lambda m, p: jax.tree.map(lambda _: m, p), tree, params)
    except ValueError as error:
        raise ValueError(
            f"mask must have the structure of the parameters or a prefix of it: {error}"
        ) from error
