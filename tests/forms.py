"""SLAMB in its two forms: one transformation, and the chain of links it stands for."""

from typing import Any

import optax

import slamb_jax

OF_RATIO = {"weight_decay", "mask", "c_min", "c_max"}
OF_MOMENTUM = {"b1", "mu_dtype"}


def links(
    exchange: slamb_jax.Exchange,
    *,
    eps: float = 1e-6,
    form: str = "sum",
    bias_correction: bool = True,
    **settings: Any,
) -> optax.GradientTransformationExtraArgs:
    """What ``scale_by_slamb`` does in one pass, link by link."""
    of_ratio = {name: settings.pop(name) for name in OF_RATIO & set(settings)}
    of_momentum = {name: settings.pop(name) for name in OF_MOMENTUM & set(settings)}
    both = {"bias_correction": bias_correction}
    adam = slamb_jax.directions.adam(eps=eps, form=form, **both, **settings)
    return optax.chain(
        slamb_jax.average_gradients(exchange),
        slamb_jax.mask_momentum(exchange, adam, **both, **of_momentum),
        slamb_jax.layerwise_trust_ratio(exchange, form=form, **of_ratio),
        slamb_jax.elementwise_rescale(exchange),
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


def moments(state: Any) -> tuple[Any, Any]:
    """m and v, of either form."""
    return part(state, "mu"), part(state, "nu")


def part(state: Any, name: str) -> Any:
    """What a state has by this name, at any depth of a chain."""
    if hasattr(state, name):
        return getattr(state, name)
    parts = state if isinstance(state, tuple) else ()
    found = (part(x, name) for x in parts)
    return next((x for x in found if x is not None), None)
