"""The optimizers of the programs from the same options, and their bytes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import slamb_jax
from examples.common import AXIS
from examples.common.options import Options
from examples.common.traffic import Traffic, report_of, traffic_of

UNDECAYED = {"bias", "scale", "relative_position_bias"}
Make = Callable[..., optax.GradientTransformation]


# With an exchange, and dense. SLAMB's exchange needs a selection.
KINDS: dict[str, tuple[Make, Make]] = {
    "adamw": (slamb_jax.adamw, optax.adamw),
    "lamb": (slamb_jax.lamb, optax.lamb),
    "slamb": (slamb_jax.slamb, optax.lamb),
    "lion": (slamb_jax.lion, optax.lion),
    "muon": (slamb_jax.muon, optax.contrib.muon),
    "sgd": (
        functools.partial(slamb_jax.sgd, momentum=0.9),
        functools.partial(optax.sgd, momentum=0.9),
    ),
}
OPTIONS = ("b1", "b2", "b3", "eps", "weight_decay", "form")  # named as arguments, but:
OTHERWISE = {"momentum": "b1", "beta": "b1", "adam_b2": "b2"}
MASKS = ("mask", "weight_decay_mask")


def dense(
    tx: optax.GradientTransformation, axis_name: str
) -> optax.GradientTransformationExtraArgs:
    """The baseline: averages gradients over the workers at every step, then ``tx``."""
    mean = optax.stateless(lambda grads, _: jax.lax.pmean(grads, axis_name))
    return optax.with_extra_args_support(optax.chain(mean, tx))


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
    first = optax.identity()
    if o.clip_norm is not None:
        first = optax.clip_by_global_norm(o.clip_norm)
    make = KINDS[o.optimizer][o.dense]
    if "weight_decay" not in inspect.signature(make).parameters:
        first = optax.chain(first, optax.add_decayed_weights(o.weight_decay or 0, mask))
    chosen = _arguments(make, o, mask)
    if o.dense:
        tx = dense(optax.chain(first, make(schedule, **chosen)), AXIS)
    else:
        tx = optax.chain(first, make(schedule, o.exchange, **chosen))
    if o.accumulate_steps > 1:
        tx = slamb_jax.accumulate(tx, o.accumulate_steps)
    return optax.with_extra_args_support(tx)


def traffic(o: Options, params: optax.Params, mesh: Mesh) -> tuple[Traffic, Traffic]:
    """The bytes of the optimizer, and those of averaging the gradients."""
    report = report_of(dense(optax.sgd(1.0), AXIS), o.exchange, params, mesh)
    every = Traffic(report.bytes_sent())
    if o.dense:
        return every, every
    make, _ = KINDS[o.optimizer]
    made = functools.partial(make, o.learning_rate, **_arguments(make, o))
    return traffic_of(made, o.exchange, params, mesh), every


def _arguments(make: Make, o: Options, mask: Any = None) -> dict[str, Any]:
    """Those of its arguments that the options give."""
    given = {name: getattr(o, name) for name in OPTIONS}
    given |= {name: given[option] for name, option in OTHERWISE.items()}
    given |= dict.fromkeys(MASKS, mask)
    taken = inspect.signature(make).parameters
    return {k: x for k, x in given.items() if k in taken and x is not None}
