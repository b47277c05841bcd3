"""What the optimizers share: the chain around their own links."""

from typing import Any, NamedTuple

import jax
import optax

from slamb_jax import links
from slamb_jax._core.checks import check_params
from slamb_jax._core.leaves import map_present
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.mask_momentum import UNIT_DECAY


def chain_between(
    exchange: Exchange, *own: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The chain of links, with those at its ends that only some exchanges need.

    Where workers are groups of devices, the mean of a group's gradients comes first.
    Where workers step by themselves, the average of their parameters comes last.
    """
    chain = list(own)
    if exchange.local_axis_name is not None:
        chain.insert(0, links.average_gradients(exchange))
    if not exchange.averages_momentum:
        chain.append(links.average_parameters_every(exchange))
    return optax.chain(*chain)


def named(
    direction: optax.GradientTransformation, state: NamedTuple
) -> optax.GradientTransformation:
    """A direction without state, whose name the state of the optimizer then has.

    Checkpoints compare the names: those of some optimizers differ in nothing else.
    """

    def update(updates: Any, _: Any, params: Any = None) -> tuple[Any, NamedTuple]:
        return direction.update(updates, optax.EmptyState(), params)[0], state

    return optax.GradientTransformation(lambda params: state, update)


def check_agrees(exchange: object) -> Exchange:
    """Raises unless it is an exchange without a selection."""
    between = check_exchange(exchange)
    if between.selection is not None:
        raise ValueError(
            f"selection={between.selection!r} exchanges a share of the momentum, as "
            "slamb_jax.slamb does: give an exchange without one, or put "
            "slamb_jax.mask_momentum(exchange) in a chain of your own"
        )
    return between


def unit_decay(exchange: Exchange) -> float | None:
    """The ``b2`` of an optimizer that has no second moment of its own."""
    return UNIT_DECAY if exchange.rounds_momentum else None


def scale_by_rate(
    learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
    """Minus the rate, in the dtype of the updates also where it is an array."""
    if not isinstance(learning_rate, jax.Array):
        return optax.scale_by_learning_rate(learning_rate)
    rate = learning_rate

    def scaled(updates: Any, params: Any) -> Any:
        del params
        return map_present(lambda u: -rate.astype(u.dtype) * u, updates)

    return optax.stateless(scaled)


def cast_to_params() -> optax.GradientTransformation:
    """The updates in the dtype of their parameters."""

    def cast(updates: Any, params: Any) -> Any:
        check_params(params)
        return map_present(lambda u, p: u.astype(p.dtype), updates, params)

    return optax.stateless(cast)
