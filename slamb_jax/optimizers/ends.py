"""The first and the last links of an optimizer, which only some exchanges need."""

import optax

from slamb_jax.average import average_gradients, average_parameters_every
from slamb_jax.exchange import Exchange, check_exchange

Links = tuple[optax.GradientTransformation, ...]


def within_workers(exchange: Exchange) -> Links:
    """Where workers are groups of devices, the mean of a group's gradients."""
    grouped = check_exchange(exchange).local_axis_name is not None
    return (average_gradients(exchange),) if grouped else ()


def between_workers(exchange: Exchange) -> Links:
    """Where workers step by themselves, the average of their parameters."""
    if exchange.averages_momentum:
        return ()
    return (average_parameters_every(exchange),)
