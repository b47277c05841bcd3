"""The optimizers of the programs, from the same options."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

import slamb_jax
from examples.common import AXIS
from examples.common.options import Options

UNDECAYED = {"bias", "scale", "relative_position_bias"}
Make = Callable[..., optax.GradientTransformation]


# With an exchange, and dense. SLAMB's exchange needs a selection.
KINDS: dict[str, tuple[Make, Make]] = {
    "adamw": (slamb_jax.adamw, optax.adamw),
    "lamb": (slamb_jax.lamb, optax.lamb),
    "slamb": (slamb_jax.slamb, optax.lamb),
    "lion": (slamb_jax.lion, optax.lion),
    "muon": (slamb_jax.muon, optax.contrib.muon),
    "sgd": (slamb_jax.sgd, optax.sgd),
}
OPTIONS = ("b1", "b2", "b3", "eps", "weight_decay", "form")  # named as arguments


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
    make = KINDS[o.optimizer][o.dense]
    taken = inspect.signature(make).parameters
    given = {name: getattr(o, name) for name in OPTIONS}
    given |= {"beta": o.b1, "adam_b2": o.b2, "momentum": 0.9 if o.b1 is None else o.b1}
    given |= {"mask": mask, "weight_decay_mask": mask}
    chosen = {k: x for k, x in given.items() if k in taken and x is not None}
    links = []
    if o.clip_norm is not None:
        links.append(optax.clip_by_global_norm(o.clip_norm))
    if "weight_decay" not in taken:
        links.append(optax.add_decayed_weights(o.weight_decay or 0, mask))
    if o.dense:
        tx = dense(optax.chain(*links, make(schedule, **chosen)), AXIS)
    else:
        tx = optax.chain(*links, make(schedule, o.exchange, **chosen))
    if o.accumulate_steps > 1:
        tx = slamb_jax.accumulate(tx, o.accumulate_steps)
    return optax.with_extra_args_support(tx)
