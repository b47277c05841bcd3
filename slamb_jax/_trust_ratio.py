"""LAMB's trust ratio, for the fresh and for the stale part of a layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes
from slamb_jax._checks import (
    check_axis_name,
    check_bools,
    check_choice,
    check_clips,
    check_params,
    check_range,
)
from slamb_jax._layout import make_layout, spread
from slamb_jax._leaves import present, spread_rows
from slamb_jax._momentum import FORMS
from slamb_jax._ratios import Layer, Ratios, Rule, ratios
from slamb_jax._rescale import freshness
from slamb_jax._selections import Selection, Strided, age_at, check_selection


class LayerwiseTrustRatioState(NamedTuple):
    """State of :func:`layerwise_trust_ratio`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def layerwise_trust_ratio(
    selection: Selection = Strided(),  # noqa: B008 (frozen)
    b3: Any = 0.7,
    *,
    axis_name: _axes.AxisName | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: str = "sum",
    c_min: Any = 0.01,
    c_max: Any = 1000.0,
    param_specs: Any = None,
    stacked: Any = None,
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
      param_specs: how the parameters are cut, as in :func:`slamb`: norms are summed
        over the mesh axes of each leaf, which must be bound. None: not at all.
      stacked: which leaves are stacks of layers, as in :func:`slamb`: each layer has
        ratios of its own. None: no leaf.

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
    check_range("weight_decay", weight_decay, 0.0, schedule=True)
    check_choice("form", form, FORMS)
    check_clips(c_min, c_max)
    if mask is not None and not callable(mask):
        check_bools("mask", mask)
    layout = make_layout(param_specs, stacked, axis_name)

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
        n = _axes.axis_size(axis_name)
        rule = Rule(selection, b3, form, c_min, c_max, n)
        decay = decay_at(weight_decay, state.count)
        trees = params, decay_mask(mask, params)
        rows, rebuild = present(updates, *trees, like=params, layout=layout)
        layers = [
            Layer(
                leaf,
                age_at(selection, step, leaf),
                add_decay(decay if form == "product" and decays else None),
                p.astype(jnp.float32),
                (u.astype(jnp.float32),),
            )
            for leaf, u, p, decays in rows
        ]

        def scale(layer: Layer, found: Ratios, dtype: Any, decays: bool) -> jax.Array:
            u = add_decay(decay if decays else None)(layer.p, *layer.rest)
            if layer.age is None:
                return (spread_rows(found.fresh, layer.leaf) * u).astype(dtype)
            r = freshness(layer.age, b3)
            ratio = found.blend(rule, r)
            if form == "sum":
                ratio = ratio / (r + (1 - r) / n**0.5)
            return (spread_rows(ratio, layer.leaf) * u).astype(dtype)

        u = rebuild(
            [
                scale(layer, found, u.dtype, decays)
                for layer, found, (_, u, _, decays) in zip(
                    layers, ratios(rule, step, layers), rows, strict=True
                )
            ]
        )
        return u, LayerwiseTrustRatioState(step)

    return optax.GradientTransformationExtraArgs(init, update)


def decay_at(weight_decay: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    """The rate of decay at a step counted from 0; None where it is the constant 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return None
    decay = weight_decay(count) if callable(weight_decay) else weight_decay
    return jnp.asarray(decay, jnp.float32)


def add_decay(decay: jax.Array | None) -> Callable[..., jax.Array]:
    """The function of p and u that adds decay to u, if there is any."""
    return lambda p, u: u if decay is None else u + decay * p


def decay_mask(mask: Any, params: optax.Params) -> optax.Params:
    """The user's mask (a tree, a prefix or a function) as one bool per parameter."""
    tree = mask(params) if callable(mask) else True if mask is None else mask
    check_bools("mask", tree)
    return spread("mask", tree, params)
