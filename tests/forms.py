"""SLAMB in its two forms: one transformation, and the chain of links it stands for."""

from typing import Any

import optax

import slamb_jax


def links(
    exchange: slamb_jax.Exchange, *, b3: float = 0.7, form: str = "sum", **settings: Any
) -> optax.GradientTransformationExtraArgs:
    """What ``scale_by_slamb`` does in one pass, link by link."""
    names = {"weight_decay", "mask", "c_min", "c_max"} & set(settings)
    of_ratio = {name: settings.pop(name) for name in names}
    return optax.chain(
        slamb_jax.average_gradients(exchange),
        slamb_jax.mask_momentum(exchange, form=form, **settings),
        slamb_jax.layerwise_trust_ratio(exchange, b3, form=form, **of_ratio),
        slamb_jax.elementwise_rescale(exchange, b3),
    )


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
