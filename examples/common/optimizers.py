"""The optimizers of the programs from the same options, and their bytes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import slamb_jax
from examples.common import AXIS
from examples.common.options import Options
from examples.common.traffic import Traffic, report_of, traffic_of

UNDECAYED = {"bias", "scale", "relative_position_bias"}
Make = Callable[..., optax.GradientTransformation]


class Kind(NamedTuple):
    """An optimizer: with an exchange, dense, and its arguments by option."""

    exchanging: Make
    dense: Make
    arguments: Mapping[str, str]


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_LION = _same("b1", "b2", "weight_decay", "mask")
_ADAMW = _LION | _same("eps")
_MUON = {"b1": "beta", "b2": "adam_b2", "mask": "weight_decay_mask"}
KINDS = {
    "adamw": Kind(slamb_jax.adamw, optax.adamw, _ADAMW),
    "lamb": Kind(slamb_jax.lamb, optax.lamb, _ADAMW | _same("form")),
    # Its exchange needs a selection.
    "slamb": Kind(slamb_jax.slamb, optax.lamb, _ADAMW | _same("form", "b3")),
    "lion": Kind(slamb_jax.lion, optax.lion, _LION),
    "muon": Kind(slamb_jax.muon, optax.contrib.muon, _ADAMW | _MUON),
    "sgd": Kind(
        functools.partial(slamb_jax.sgd, momentum=0.9),
        functools.partial(optax.sgd, momentum=0.9),
        {"b1": "momentum"},
    ),
}
EXCHANGING_ONLY = {"form", "b3"}  # options that no optimizer of optax has


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
    kind = KINDS[o.optimizer]
    if "weight_decay" not in kind.arguments:
        first = optax.chain(first, optax.add_decayed_weights(o.weight_decay or 0, mask))
    chosen = _arguments(o, mask)
    if o.dense:
        tx = dense(optax.chain(first, kind.dense(schedule, **chosen)), AXIS)
    else:
        tx = optax.chain(first, kind.exchanging(schedule, o.exchange, **chosen))
    if o.accumulate_steps > 1:
        tx = slamb_jax.accumulate(tx, o.accumulate_steps)
    return optax.with_extra_args_support(tx)


def traffic(o: Options, params: optax.Params, mesh: Mesh) -> tuple[Traffic, Traffic]:
    """The bytes of the optimizer, and those of averaging the gradients."""
    report = report_of(dense(optax.sgd(1.0), AXIS), o.exchange, params, mesh)
    every = Traffic(report.bytes_sent())
    if o.dense:
        return every, every
    make = functools.partial(
        KINDS[o.optimizer].exchanging, o.learning_rate, **_arguments(o)
    )
    return traffic_of(make, o.exchange, params, mesh), every


def _arguments(o: Options, mask: Any = None) -> dict[str, Any]:
    """The arguments of the optimizer that the options give."""
    left_out = EXCHANGING_ONLY if o.dense else set()
    names = KINDS[o.optimizer].arguments
    found = {
        argument: mask if option == "mask" else getattr(o, option)
        for option, argument in names.items()
        if option not in left_out
    }
    return {argument: x for argument, x in found.items() if x is not None}
