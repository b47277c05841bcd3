"""Settings of an exchange together: they train, or are refused with a reason."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import slamb_jax
from tests.optimizers import plain, random_tree
from tests.pairwise import Row, name_of, pairwise
from tests.workers import P

STEPS = 24
CODES = {  # blocks that fit the small leaves here
    "uniform8": slamb_jax.payloads.StochasticUniform(block_size=16),
    "uniform4": slamb_jax.payloads.StochasticUniform(
        4, block_size=16, error_feedback=True
    ),
    "natural8": slamb_jax.payloads.NaturalCompression(block_size=16),
}
CHOICES = {
    "selection": ("strided", "top_k", "permutation", "bernoulli", "by phase"),
    "form": ("sum", "product"),
    "payload": (None, "bfloat16", *CODES),
    "average_payload": (None, "bfloat16", "float16", "uniform8"),
    "mu_dtype": (None, "bfloat16"),
    "nu_of": ("gradient", "momentum"),
    "nu_dtype": (None, "bfloat16"),
    "groups": (False, True),
    "overlap": (False, True),
    "shards": (False, True),
    "stacked": (False, True),
    "wrapped": (None, "skip", "master", "stochastic", "accumulate"),
}
DEFAULT: Row = {name: values[0] for name, values in CHOICES.items()}
SPECS = {"stack": P(None, None, "model"), "w": P("model", None), "b": P()}
SHAPES = {"stack": (3, 8, 16), "w": (16, 8), "b": (8,)}


pytestmark = pytest.mark.usefixtures("standard_promotion")


def exchange(choice: Row) -> slamb_jax.Exchange:
    by_phase = choice["selection"] == "by phase"
    return plain(
        "data",
        local_axis_name="device" if choice["groups"] else None,
        compress_ratio={0: 0.5, 6: 0.25} if by_phase else 0.25,
        min_size=0,
        selection="strided" if by_phase else choice["selection"],
        payload=CODES.get(choice["payload"], choice["payload"]),
        overlap=choice["overlap"],
        sync_every=5,
        average_payload=CODES.get(choice["average_payload"], choice["average_payload"]),
        param_specs=SPECS if choice["shards"] else None,
        stacked={"stack": True, "w": False, "b": False} if choice["stacked"] else None,
    )


def optimizer(choice: Row) -> optax.GradientTransformation:
    settings = {k: choice[k] for k in ("form", "mu_dtype", "nu_of", "nu_dtype")}
    # eps: a gradient in bfloat16 can be 0, and v with it, where the mean m is not.
    settings["eps"] = 1e-3
    rate, between = optax.linear_schedule(0.2, 0.0, STEPS), exchange(choice)
    tx = slamb_jax.slamb(rate, between, **settings)
    match choice["wrapped"]:
        case "skip":
            return slamb_jax.skip_not_finite(tx, between)
        case "master" | "stochastic" as rounding:
            return slamb_jax.train_in_bfloat16(tx, rounding)
        case "accumulate":
            return slamb_jax.accumulate(tx, 2)
    return tx


def distance_left(choice: Row) -> float:
    """How far 8 devices end from the mean of their targets, as a share of the way."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "device", "model"))
    tx = optimizer(choice)
    narrow = choice["wrapped"] in ("master", "stochastic")
    dtype = jnp.bfloat16 if narrow else jnp.float32
    steps = STEPS * (2 if choice["wrapped"] == "accumulate" else 1)
    specs = SPECS if choice["shards"] else jax.tree.map(lambda _: P(), SPECS)

    def train(goal: Any) -> jax.Array:
        worker = 2 * lax.axis_index("data") - 1 + 0.0
        if choice["groups"]:  # its devices pull apart too
            worker = worker + 2 * lax.axis_index("device") - 1
        own = jax.tree.map(lambda x: x * (1 + 0.5 * worker), goal)
        start = jax.tree.map(lambda x: jnp.flip(x).astype(dtype), goal)

        def step(carry: Any, _: None) -> tuple[Any, None]:
            params, state = carry
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            grads = jax.tree.map(lambda p, x: (p - x).astype(dtype), wide, own)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params, _ = lax.scan(step, (start, tx.init(start)), length=steps)[0]
        mean = slamb_jax.average_parameters(params, ("data", "device"))

        def distance(a: Any) -> jax.Array:
            apart = jax.tree.map(lambda p, x: p.astype(jnp.float32) - x, a, goal)
            return optax.tree.norm(apart)

        return distance(mean) / distance(start)

    run = jax.shard_map(
        train, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )
    return float(jax.jit(run)(random_tree(SHAPES, 0)))


TOGETHER: list[Row] = [
    {"selection": "top_k", "payload": "uniform8", "overlap": True, "groups": True},
    {"payload": "uniform4", "shards": True, "stacked": True, "wrapped": "master"},
    {"selection": "by phase", "average_payload": "uniform8", "wrapped": "skip"},
    {"selection": "top_k", "shards": True},
]


def case(choice: Row, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(choice, id=name_of(choice, DEFAULT), marks=marks)


CASES = [case(DEFAULT | choice) for choice in TOGETHER]
CASES += [case(choice, pytest.mark.long) for choice in pairwise(CHOICES)]


@pytest.mark.parametrize("choice", CASES)
def test_choices_together(choice: Row) -> None:
    """A few by default; in CI any two."""
    if choice["selection"] == "top_k" and choice["shards"]:
        with pytest.raises(ValueError, match=r"selection=.* and param_specs cannot"):
            exchange(choice)
        return
    assert distance_left(choice) < 0.5, choice
