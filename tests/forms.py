"""SLAMB in its two forms: one transformation, and the chain of links it stands for."""

from typing import Any

import optax

import slamb_jax


def links(
    exchange: slamb_jax.Exchange,
    *,
    b3: float = 0.7,
    form: str = "sum",
    weight_decay: Any = 0.0,
    mask: Any = None,
    c_min: float = 0.01,
    c_max: float = 1000.0,
    **moments: Any,
) -> optax.GradientTransformationExtraArgs:
    """What ``scale_by_slamb`` does in one pass, link by link."""
    return optax.chain(
        slamb_jax.average_gradients(exchange),
        slamb_jax.mask_momentum(exchange, form=form, **moments),
        slamb_jax.layerwise_trust_ratio(
            exchange, b3, weight_decay=weight_decay, mask=mask, form=form,
            c_min=c_min, c_max=c_max,
        ),
        slamb_jax.elementwise_rescale(exchange, b3),
    )  # fmt: skip


def chain(
    learning_rate: Any, exchange: slamb_jax.Exchange, **settings: Any
) -> optax.GradientTransformationExtraArgs:
    """``slamb``, link by link."""
    return optax.chain(
        links(exchange, **settings),
        optax.scale_by_learning_rate(learning_rate),
        slamb_jax.average_parameters_every(exchange),
    )


FORMS = {"fused": slamb_jax.slamb, "chain": chain}


def moments(state: Any) -> Any:
    """The part of the state that has mu and nu, of either form."""
    if hasattr(state, "mu"):
        return state
    parts = state if type(state) is tuple else ()
    return next(filter(None, map(moments, parts)), None)
