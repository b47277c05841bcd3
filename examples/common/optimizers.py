"""SLAMB, dense LAMB and SGD with momentum from the same options, and their bytes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import optax
from jax.sharding import Mesh

import slamb_jax
from examples.common import AXIS
from examples.common.options import Options
from examples.common.traffic import Traffic, report_of, slamb_traffic

UNDECAYED = {"bias", "scale", "relative_position_bias"}


def dense(
    tx: optax.GradientTransformation, axis_name: str
) -> optax.GradientTransformationExtraArgs:
    """The baseline: averages gradients over the workers at every step, then ``tx``."""
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, axis_name))
    return optax.with_extra_args_support(optax.chain(mean, tx))


def slamb_from_links(
    learning_rate: optax.ScalarOrSchedule,
    exchange: slamb_jax.Exchange,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    nu_of: Literal["gradient", "momentum", "larger"] = "gradient",
) -> optax.GradientTransformationExtraArgs:
    """SLAMB built link by link: the same steps as ``slamb_jax.slamb``."""
    adam = slamb_jax.directions.adam(b2, eps, form="sum", nu_of=nu_of)
    return optax.chain(
        slamb_jax.mask_momentum(exchange, adam, b1),
        slamb_jax.layerwise_trust_ratio(exchange),
        slamb_jax.elementwise_rescale(exchange),
        optax.scale_by_learning_rate(learning_rate),
        slamb_jax.average_parameters_every(exchange),
    )


def kernels(params: optax.Params) -> optax.Params:
    """A decay mask: not biases, norms and tables of positions, by name.

    By name, since the biases of Flax's attention have two dimensions.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key not in UNDECAYED, params
    )


def optimizer(
    o: Options, schedule: optax.Schedule, mask: Any = None
) -> optax.GradientTransformationExtraArgs:
    """The chain that the options name; ``mask`` says which leaves decay."""
    clip = optax.identity()
    if o.clip_norm is not None:
        clip = optax.clip_by_global_norm(o.clip_norm)
    if o.optimizer == "slamb":
        tx = optax.chain(clip, _slamb(o, schedule, mask)(exchange_of(o)))
    else:
        inner = optax.chain(
            optax.add_decayed_weights(o.weight_decay, mask),
            optax.sgd(schedule, momentum=o.b1),
        )
        if o.optimizer == "lamb":
            decay = {"weight_decay": o.weight_decay, "mask": mask}
            inner = optax.lamb(schedule, o.b1, o.b2, o.eps, **decay)
        tx = dense(optax.chain(clip, inner), AXIS)
    if o.accumulate_steps > 1:
        tx = slamb_jax.accumulate(tx, o.accumulate_steps)
    return optax.with_extra_args_support(tx)


def exchange_of(o: Options) -> slamb_jax.Exchange:
    """The run's exchange: unless it has a seed of its own, with the run's."""
    if isinstance(o.exchange.selection, str) and o.exchange.seed is None:
        return dataclasses.replace(o.exchange, seed=o.seed)
    return o.exchange


def traffic(o: Options, params: optax.Params, mesh: Mesh) -> tuple[Traffic, Traffic]:
    """What the optimizer sends, and what averaging the gradients would send."""
    report = report_of(dense(optax.sgd(1.0), AXIS), o.exchange, params, mesh)
    every = Traffic({0: report.bytes_sent()})
    if o.optimizer != "slamb":
        return every, every
    make = _slamb(o, optax.constant_schedule(o.learning_rate), None)
    return slamb_traffic(make, exchange_of(o), params, mesh), every


def _slamb(
    o: Options, schedule: optax.Schedule, mask: Any
) -> Callable[[slamb_jax.Exchange], optax.GradientTransformation]:
    names = ("b1", "b2", "eps", "weight_decay", "form", "nu_of")
    settings = {name: getattr(o, name) for name in names}
    return functools.partial(slamb_jax.slamb, schedule, mask=mask, **settings)
