"""The optimizers that the main job can compare, each with its tuned rate."""

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

TRUST = 0.005  # LARS's relative step at a rate of 1, before momentum
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


def slamb(
    name: str,
    recipe: recipes.Recipe,
    settings: Mapping[str, Any],
    make: Callable[..., optax.GradientTransformation] = slamb_jax.slamb,
) -> Method:
    """SLAMB at a recipe; ``settings`` of the exchange go before the recipe's."""
    return Method(
        name,
        lambda rate, exchange: make(rate, exchange, **recipe.optimizer),
        recipe.exchange(AXIS, **settings),
    )


def lamb() -> Method:
    """LAMB on gradients that are averaged at every step."""
    return Method("LAMB (dense)", lambda rate, _: dense(optax.lamb(rate), AXIS))


def lars() -> Method:
    """LARS on gradients that are averaged at every step."""
    return Method(
        "LARS (dense)",
        lambda rate, _: dense(
            optax.lars(rate, trust_coefficient=TRUST, trust_ratio_mask=matrices), AXIS
        ),
    )


def jointspar_lars(steps: int, seed: int) -> Method:
    """JointSpar-LARS: only the gradients of the blocks that were drawn."""
    return Method(
        "JointSpar-LARS",
        lambda rate, _: jointspar.jointspar_lars(
            rate,
            blocks,
            BUDGET,
            horizon=steps,
            axis_name=AXIS,
            trust_coefficient=TRUST,
            trust_ratio_mask=matrices,
            seed=seed,
        ),
    )


def method(name: str, steps: int, seed: int, settings: Mapping[str, Any]) -> Method:
    """The method of that name; ``settings`` are of every SLAMB's exchange."""
    match name:
        case "lamb":
            return lamb()
        case "lars":
            return lars()
        case "jointspar_lars":
            return jointspar_lars(steps, seed)
        case "slamb_paper":
            return slamb("SLAMB, as published", recipes.PAPER, settings)
        case "slamb_float32":
            return slamb("SLAMB, float32", recipes.FLOAT32, settings)
        case "slamb_few_bytes":
            return slamb("SLAMB, few bytes", recipes.FEW_BYTES, settings)
        case "slamb_large_batch":
            return slamb("SLAMB, large batch", recipes.LARGE_BATCH, settings)
        case "slamb_from_links":
            from_links = "SLAMB, float32, from links"
            return slamb(from_links, recipes.FLOAT32, settings, slamb_from_links)
    raise ValueError(f"name must be one of {', '.join(RATES)}, got {name!r}")


def bytes_sent(
    name: str, method: Method, params: optax.Params, mesh: Mesh
) -> Callable[[int], float]:
    """Bytes each worker sends in the first t steps, read off the compiled optimizer."""

    def make(exchange: slamb_jax.Exchange) -> optax.GradientTransformation:
        return method.make(optax.constant_schedule(1.0), exchange)

    if name.startswith("slamb"):
        return slamb_traffic(make, method.exchange, params, mesh).until
    report = report_of(make(method.exchange), method.exchange, params, mesh)
    # JointSpar's blocks, all of one size, stand in branches: so many are taken.
    share = BUDGET / len(set(blocks(params).values()) - {None})
    each = report.bytes_sent() + share * report.bytes_sent(conditional=True)
    return Traffic({0: each}).until
