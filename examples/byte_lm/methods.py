"""The optimizers that the main job can compare, each with its tuned rate."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import slamb_jax
from examples.byte_lm.model import blocks
from examples.common import AXIS
from examples.common.optimizers import dense, slamb_from_links
from examples.common.simulated import Method
from examples.common.traffic import Traffic, report_of, slamb_traffic
from slamb_jax import jointspar, recipes

BUDGET = 2.0  # blocks that JointSpar trains per step, on average
RATES = {
    "lamb": 0.02,
    "slamb_paper": 0.0141,
    "slamb_float32": 0.0283,
    "slamb_few_bytes": 0.0283,
    "slamb_large_batch": 0.02,
    "slamb_from_links": 0.0283,
    "lars": 1.0,
    "jointspar_lars": 1.0,
}
"""The peak rates; the first four come from ``python -m examples.byte_lm.sweep``."""


def matrices(params: optax.Params) -> optax.Params:
    """Leaves that LARS gives a rate of their own: biases and norms start from zero."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


# LARS's relative step is 0.005 at a rate of 1, before momentum.
LARS: dict[str, Any] = {"trust_coefficient": 0.005, "trust_ratio_mask": matrices}
SLAMBS = {
    "slamb_paper": ("SLAMB, as published", recipes.PAPER),
    "slamb_float32": ("SLAMB, float32", recipes.FLOAT32),
    "slamb_few_bytes": ("SLAMB, few bytes", recipes.FEW_BYTES),
    "slamb_large_batch": ("SLAMB, large batch", recipes.LARGE_BATCH),
    "slamb_from_links": ("SLAMB, float32, from links", recipes.FLOAT32),
}


def method(name: str, steps: int, seed: int, settings: Mapping[str, Any]) -> Method:
    """The method of that name; ``settings`` are of every SLAMB's exchange."""
    if name in SLAMBS:
        title, recipe = SLAMBS[name]
        make = slamb_from_links if name == "slamb_from_links" else slamb_jax.slamb
        exchange = recipe.exchange(AXIS, **settings)
        return Method(title, functools.partial(make, **recipe.optimizer), exchange)
    if name == "lamb":
        return Method("LAMB (dense)", lambda rate, _: dense(optax.lamb(rate), AXIS))
    if name == "lars":
        return Method(
            "LARS (dense)", lambda rate, _: dense(optax.lars(rate, **LARS), AXIS)
        )
    if name == "jointspar_lars":
        return Method(
            "JointSpar-LARS",
            lambda rate, _: jointspar.jointspar_lars(
                rate, blocks, BUDGET, horizon=steps, axis_name=AXIS, seed=seed, **LARS
            ),
        )
    raise ValueError(f"name must be one of {', '.join(RATES)}, got {name!r}")


def bytes_sent(
    name: str, method: Method, params: optax.Params, mesh: Mesh
) -> Callable[[int], float]:
    """Bytes each worker sends in the first t steps, read off the compiled optimizer."""
    make = functools.partial(method.make, optax.constant_schedule(1.0))
    if name in SLAMBS:
        return slamb_traffic(make, method.exchange, params, mesh).until
    report = report_of(make(method.exchange), method.exchange, params, mesh)
    # JointSpar's blocks, all of one size, stand in branches: so many are taken.
    share = BUDGET / len(set(blocks(params).values()) - {None})
    each = report.bytes_sent() + share * report.bytes_sent(conditional=True)
    return Traffic({0: each}).until
