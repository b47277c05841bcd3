"""SLAMB's direction, ratio and rescaling in the fewest passes over memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes
from slamb_jax._checks import check_params
from slamb_jax._compress import randk_compress_with_error_feedback
from slamb_jax._gradients import mean_gradients
from slamb_jax._layout import make_layout
from slamb_jax._leaves import Leaf, present, spread_rows
from slamb_jax._momentum import (
    Corrections,
    corrections,
    direction,
    mask_momentum,
)
from slamb_jax._quantize import Payload
from slamb_jax._ratios import Layer, Ratios, Rule, ratios
from slamb_jax._rescale import elementwise_rescale, freshness
from slamb_jax._selections import Selection, age_at, chosen_last
from slamb_jax._trust_ratio import (
    add_decay,
    decay_at,
    decay_mask,
    layerwise_trust_ratio,
)

_LARGE = 2**16  # elements: below, what a barrier would save is not worth one


def scale_by_slamb(
    selection: Selection,
    *,
    axis_name: _axes.AxisName | None,
    local_axis_name: _axes.AxisName | None,
    payload: Payload,
    b1: Any,
    b2: Any,
    b3: Any,
    eps: Any,
    weight_decay: optax.ScalarOrSchedule,
    mask: Any,
    form: str,
    c_min: Any,
    c_max: Any,
    bias_correction: bool,
    mu_dtype: Any,
    overlap: bool,
    nu_of: str,
    nu_dtype: Any,
    param_specs: Any,
    stacked: Any,
) -> optax.GradientTransformationExtraArgs:
    """What the first three links of SLAMB's chain compute, with the same state.

    The first, :func:`mask_momentum`, does its own work here, exchange included, but for
    the direction u: that is computed once for the norms and once more for the update,
    from m and v, and so never kept in memory. In 16 bits it is not rounded between the
    links either. For the arguments see :func:`slamb`.
    """
    laid_out = {"param_specs": param_specs, "stacked": stacked}
    layout = make_layout(param_specs, stacked, axis_name)
    compressor = randk_compress_with_error_feedback(
        selection,
        axis_name=axis_name,
        local_axis_name=local_axis_name,
        payload=payload,
        keep_residual=False,
        **laid_out,
    )
    links = (
        mask_momentum(
            compressor,
            b1,
            b2,
            eps,
            form=form,
            bias_correction=bias_correction,
            mu_dtype=mu_dtype,
            overlap=overlap,
            nu_of=nu_of,
            nu_dtype=nu_dtype,
        ),
        layerwise_trust_ratio(
            selection,
            b3,
            axis_name=axis_name,
            weight_decay=weight_decay,
            mask=mask,
            form=form,
            c_min=c_min,
            c_max=c_max,
            **laid_out,
        ),
        elementwise_rescale(selection, b3, axis_name=axis_name, **laid_out),
    )

    def init(params: optax.Params) -> tuple[optax.OptState, ...]:
        return tuple(link.init(params) for link in links)

    def update(
        updates: optax.Updates,
        state: tuple[Any, ...],
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, tuple[Any, ...]]:
        check_params(params)
        updates = mean_gradients(updates, params, local_axis_name)
        _, momentum = links[0].update(updates, state[0], params, **extra_args)
        step = momentum.count
        n = _axes.axis_size(axis_name)
        chosen = chosen_last(selection, momentum.compressor.chosen)
        rule = Rule(chosen, b3, form, c_min, c_max, n)
        at = corrections(form, step, b1, b2, eps, bias_correction)
        decay = decay_at(weight_decay, state[0].count)
        trees = momentum.mu, momentum.nu, params, decay_mask(mask, params)
        rows, rebuild = present(updates, *trees, like=params, layout=layout)

        def along(at: Corrections, decays: bool) -> Callable[..., jax.Array]:
            add = add_decay(decay if decays else None)
            return lambda p, m, v: add(p, direction(at, m, v))

        def layer(leaf: Leaf, m: Any, v: Any, p: Any, decays: bool) -> Layer:
            own = at
            if leaf.size >= _LARGE:
                # With the scalars behind a barrier of this leaf's, they do not become
                # arrays that leaves of one shape share.
                m, v, own = jax.lax.optimization_barrier((m, v, at))
            normed = along(own, decays and form == "product")
            age = age_at(chosen, step, leaf)
            return Layer(leaf, age, normed, p.astype(jnp.float32), (m, v))

        layers = [layer(leaf, *columns) for leaf, _, *columns in rows]

        def scale(layer: Layer, found: Ratios, decays: bool) -> jax.Array:
            factor, (m, v), again = found.fresh, layer.rest, at
            if layer.age is not None:
                r = freshness(layer.age, b3)
                factor = found.blend(rule, r)
                if form == "product":
                    factor = factor * (r + (1 - r) / n**0.5)
            if layer.leaf.size >= _LARGE:
                # Else the compiler would keep u from the norms to here.
                m, v, factor, again = jax.lax.optimization_barrier((m, v, factor, at))
            return spread_rows(factor, layer.leaf) * along(again, decays)(layer.p, m, v)

        scaled = [
            scale(layer, found, decays).astype(p.dtype)
            for layer, found, (*_, p, decays) in zip(
                layers, ratios(rule, step, layers), rows, strict=True
            )
        ]
        counts = [type(s)(optax.safe_increment(s.count)) for s in state[1:]]
        return rebuild(scaled), (momentum, *counts)

    return optax.GradientTransformationExtraArgs(init, update)
