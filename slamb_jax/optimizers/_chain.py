"""What the optimizers share: the chain around their own links."""

from typing import Any

import jax.numpy as jnp
import optax

from slamb_jax import links
from slamb_jax._core.checks import check_params, check_range
from slamb_jax._core.leaves import bool_for_each, keep_absent, map_present
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.layerwise_trust_ratio import check_decay
from slamb_jax.links.mask_momentum import UNIT_DECAY


def chain_between(
    name: str, exchange: Exchange, *own: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The chain of links, with those at its ends that only some exchanges need.

    Where workers are groups of devices, the mean of a group's gradients comes first.
    Where workers step by themselves, the average of their parameters comes last.
    Behind all is the optimizer's ``name``, as ``{name: EmptyState()}`` in the state:
    checkpoints compare it, as the states of some optimizers differ in nothing else.
    """
    chain = list(own)
    if exchange.local_axis_name is not None:
        chain.insert(0, links.average_gradients(exchange))
    if not exchange.averages_momentum:
        chain.append(links.average_parameters_every(exchange))
    return optax.chain(*chain, optax.named_chain((name, optax.identity())))


def check_agrees(exchange: object) -> Exchange:
    """Raises unless it is an exchange without a selection."""
    between = check_exchange(exchange)
    if between.selection is not None:
        raise ValueError(
            f"selection={between.selection!r} is for slamb_jax.slamb, and for chains "
            "of your own with slamb_jax.mask_momentum: give an exchange without one"
        )
    return between


def unit_decay(exchange: Exchange) -> float | None:
    """The ``b2`` of an optimizer that has no second moment of its own."""
    return UNIT_DECAY if exchange.rounds_momentum else None


def step_by(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""The step along a direction, :math:`-lr\,(u + \lambda p)`.

    ``optax.add_decayed_weights`` and ``optax.scale_by_learning_rate`` in float32, as
    the links in front of it are, and then rounded once, to the dtype of the parameters.
    """
    check_range("learning_rate", learning_rate, schedule=True)
    check_decay(weight_decay, mask)
    decay = optax.add_decayed_weights(_in_float32(weight_decay))
    rate = optax.scale_by_learning_rate(_in_float32(learning_rate))

    def update(
        updates: optax.Updates,
        state: tuple[optax.OptState, optax.OptState],
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, tuple[optax.OptState, optax.OptState]]:
        del extra_args
        check_params(params)
        wide = map_present(lambda _, p: p.astype(jnp.float32), updates, params)
        decaying = updates
        if mask is not None:
            # A gradient that is None has no part in a mask, so that optax would refuse
            # it. To optax leaves that do not decay are such, too.
            decays = bool_for_each("mask", mask, params)
            decaying = map_present(lambda u, x: u if x else None, updates, decays)
        decayed, decay_state = decay.update(decaying, state[0], wide)
        u, rate_state = rate.update(keep_absent(decayed, updates), state[1])
        rounded = map_present(lambda u, p: u.astype(p.dtype), u, params)
        return rounded, (decay_state, rate_state)

    return optax.GradientTransformationExtraArgs(
        lambda params: (decay.init(params), rate.init(params)), update
    )


def _in_float32(value: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
    """An array in float32: ``optax.inject_hyperparams`` makes some of 16 bits."""
    return jnp.asarray(value, jnp.float32) if hasattr(value, "dtype") else value
