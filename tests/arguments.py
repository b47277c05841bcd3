"""Every argument of every public function that returns a transformation.

Of each another value than its default, and what it must not be.
"""

import inspect
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax import jointspar
from slamb_jax.exchange.selections import Strided
from slamb_jax.links import directions
from tests.optimizers import random_tree
from tests.workers import P

SHAPES = {"w": (4, 3), "kernels": (2, 3, 4), "b": (3,)}
PARAMS = random_tree(SHAPES, 0)
ONE = slamb_jax.Exchange()
PAPER = slamb_jax.Exchange.paper(selection=Strided(0.25, min_size=4))
RATE, SLOWER = (lambda t, x=x: x / (1 + jnp.float32(t)) for x in (0.1, 0.02))


def public():
    """The public functions that return a transformation, by their names."""
    for space in (slamb_jax, jointspar, directions):
        prefix = "directions." if space is directions else ""
        for name, value in vars(space).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                returned = inspect.signature(value).return_annotation
                # on_workers wants trees with a leading axis: test_mappings.py
                if "GradientTransformation" in str(returned) and name != "on_workers":
                    yield prefix + name, value


def of_kernels(value, other):
    return lambda params: jax.tree.map(
        lambda x: value if jnp.ndim(x) == 3 else other, params
    )


MASK, LAYERS = of_kernels(True, False), of_kernels("one", "two")
KERNELS = of_kernels(directions.DimensionNumbers(1, 2), None)
B1 = {"w": 0.8, "kernels": 0.5, "b": 0.8}
ADAM = {"b1": B1, "b2": 0.9, "mu_dtype": jnp.bfloat16}
STEP = {"learning_rate": RATE, "exchange": ONE, "weight_decay": SLOWER, "mask": MASK}
RATIO = {"form": "product", "c_min": 0.5, "c_max": 2.0}
MUON = {"ns_coeffs": ((3.0, -4.0, 2.0),) * 2, "ns_steps": 2, "eps": 1e-3,
        "consistent_rms": 0.3}  # fmt: skip
ARGUMENTS = {  # a value, other than the default, of every argument
    slamb_jax.adamw: STEP | ADAM | {"eps": 1e-3, "eps_root": 1e-3, "nesterov": True},
    slamb_jax.lamb: STEP | ADAM | RATIO | {"eps": 1e-3},
    slamb_jax.slamb: STEP | ADAM | RATIO | {
        "exchange": PAPER, "eps": 1e-3, "b3": 0.7
    },
    slamb_jax.lion: STEP | {"b1": 0.5, "b2": 0.7, "mu_dtype": jnp.bfloat16},
    slamb_jax.sgd: {
        "learning_rate": RATE, "exchange": ONE, "momentum": 0.7, "nesterov": True,
        "accumulator_dtype": jnp.bfloat16,
    },
    slamb_jax.muon: MUON | {
        "learning_rate": RATE, "exchange": ONE, "beta": 0.7, "weight_decay": 0.1,
        "weight_decay_mask": MASK, "mu_dtype": jnp.bfloat16, "nesterov": False,
        "adam_b1": 0.5, "adam_b2": 0.9, "adam_eps_root": 1e-3,
        "adam_weight_decay": SLOWER, "adam_learning_rate": SLOWER,
        "muon_weight_dimension_numbers": KERNELS,
    },
    slamb_jax.mask_momentum: ADAM | {
        "exchange": ONE, "direction": directions.adam(), "share": 0.6, "nesterov": True,
        "compressor": optax.identity(), "bias_correction": False,
    },
    slamb_jax.layerwise_trust_ratio: RATIO | {
        "exchange": PAPER, "direction": optax.scale(2.0), "b3": 0.7,
        "weight_decay": RATE, "mask": MASK,
    },
    slamb_jax.elementwise_rescale: {"exchange": PAPER, "b3": 0.7},
    slamb_jax.randk_compress_with_error_feedback: {"exchange": PAPER},
    slamb_jax.compress_with_error_feedback: {
        "compressor": slamb_jax.compressors.of_exchange(ONE), "decay": 0.5
    },
    slamb_jax.average_gradients: {"exchange": ONE},
    slamb_jax.average_parameters_every: {
        "exchange": slamb_jax.Exchange(payload=None, outer=optax.sgd(1.0)),
        "compressor": slamb_jax.compress_with_error_feedback(
            slamb_jax.compressors.of_exchange(ONE)
        ),
    },
    slamb_jax.on_shards: {"tx": optax.sgd(0.1), "exchange": ONE},
    slamb_jax.accumulate: {"tx": optax.sgd(0.1), "every": 2},
    slamb_jax.skip_not_finite: {"tx": optax.sgd(0.1), "exchange": ONE},
    directions.adam: {"eps": 1e-3, "eps_root": 1e-3, "eps_before_correction": True},
    directions.muon: MUON | {
        "weight_dimension_numbers": KERNELS, "param_specs": P()
    },
    jointspar.jointspar: {
        "tx": optax.sgd(0.1), "exchange": ONE, "layers": LAYERS, "budget": 1.5,
        "p_min": 0.5, "horizon": 20, "sampling": "per_worker", "seed": 3,
    },
}  # fmt: skip

DECAY_RATES = {"b1", "b2", "b3", "adam_b1", "adam_b2", "beta", "momentum", "share"}
EPSILONS = {"eps", "eps_root", "adam_eps_root"}
NUMBERS = DECAY_RATES | EPSILONS | {  # the others are no hyperparameters
    "learning_rate", "adam_learning_rate", "weight_decay", "adam_weight_decay", "c_min",
    "c_max", "consistent_rms",
}  # fmt: skip


def each_argument(names):
    """A test of every function and its arguments of these names."""
    cases = [
        (make, x) for make, given in ARGUMENTS.items() for x in given if x in names
    ]
    ids = lambda x: getattr(x, "__name__", x)  # noqa: E731
    return pytest.mark.parametrize(("make", "name"), cases, ids=ids)


KINDS = True, "0.5", 1j  # that are no numbers


def numbers(interval, *outside, kinds=(*KINDS, abs)):
    """Of an argument in an interval: other kinds, and what is outside."""
    outside = math.nan, *outside
    return {f"be a number in {interval}": kinds, f"be in {interval}": outside}


POSITIVE, NOT_NEGATIVE, UNIT = r"\(0.0, inf\]", r"\[0.0, inf\]", r"\[0.0, 1.0\]"
SCHEDULED = numbers(NOT_NEGATIVE, -0.1, kinds=KINDS)
# Lion's b2 may not be 0. In float32 the last number is 1.
DECAY = numbers(r"(\[|\()0.0, 1.0\)", -1.0, -1, 1.0, math.inf, 1 - 1e-9)
BOOL = {"be True or False": (1, None)}
NO_MOMENT = "int32", "float16", "float64", "none", jnp.complex64
MOMENT = {"be None, float32 or bfloat16": NO_MOMENT}
MASKS = {"be None, bools or a function": (3,)}
# By its name what an argument must be, whichever function has it, and what it is not.
WRONG = {
    **dict.fromkeys(DECAY_RATES, DECAY),
    **dict.fromkeys(EPSILONS, numbers(NOT_NEGATIVE, -1.0, -1)),
    **dict.fromkeys(("weight_decay", "adam_weight_decay"), SCHEDULED),
    **dict.fromkeys(("nesterov", "bias_correction", "eps_before_correction"), BOOL),
    **dict.fromkeys(("mu_dtype", "accumulator_dtype"), MOMENT),
    **dict.fromkeys(("mask", "weight_decay_mask"), MASKS),
    "b3": numbers(UNIT, -1.0, -1, 1.01),
    "decay": numbers(UNIT, -1, 1.5),
    "eps": numbers(POSITIVE, -1.0, -1, 0, 1e-50),
    "learning_rate": numbers(r"\[-inf, inf\]", kinds=(*KINDS, None, [0.1])),
    "adam_learning_rate": numbers(r"\[-inf, inf\]", kinds=KINDS),
    "c_min": numbers(NOT_NEGATIVE, -1.0),
    "c_max": numbers(r"\[0.5, inf\]", -1),
    "consistent_rms": numbers(POSITIVE, 0, -1),
    "budget": numbers(POSITIVE, 0),
    "p_min": numbers(r"\(0.0, 0.75\]", 0.0),
    "horizon": {"be an integer of at least 1": (0,)},
    "seed": {"be an integer": (0.5,)},
    "every": {"be an integer of at least 1": (0, 2.0)},
    "ns_steps": {"be an integer of at least 1": (0, 2.5)},
    "ns_coeffs": {"be three numbers, or": ((1.0, 2.0), ((1.0, 2.0, 3.0),))},
    "form": {"be one of sum, product": ("product ", "difference", None)},
    "sampling": {"be one of shared, per_worker": ("private",)},
    "layers": {"be a string or None": (3,)},
    "exchange": {"be an Exchange": ("data", 3, {"w": 1})},
    "tx": {"be an optax.GradientTransformation": ("sgd", optax.sgd)},
    "direction": {"be an optax.GradientTransformation": ("adam", directions.adam)},
    "compressor": {"be an optax.GradientTransformation": ("randk", optax.sgd)},
}
