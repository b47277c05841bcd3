"""Every choice of ``slamb`` beside every other: it works, or is refused, and why."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh

import slamb_jax
from tests.workers import P

STEPS = 24
CHOICES = {
    "selection": ("strided", "top_k", "permutation", "bernoulli", "by phase"),
    "form": ("sum", "product"),
    "payload": (
        None,
        "bfloat16",
        "float16",
        "uniform8",
        "uniform4",
        "natural",
        "natural4",
    ),
    "average_payload": (None, "bfloat16", "uniform8"),
    "mu_dtype": (None, "bfloat16"),
    "nu_of": ("gradient", "momentum", "larger"),
    "nu_dtype": (None, "bfloat16"),
    "groups": (False, True),
    "overlap": (False, True),
    "shards": (False, True),
    "stacked": (False, True),
    "wrapped": (None, "skip", "master", "stochastic", "accumulate"),
}
DEFAULT = {name: values[0] for name, values in CHOICES.items()}
CODES = {
    "uniform8": slamb_jax.StochasticUniform(block_size=16),
    "uniform4": slamb_jax.StochasticUniform(4, block_size=16, error_feedback=True),
    "natural": slamb_jax.NaturalCompression(8, block_size=16),
    "natural4": slamb_jax.NaturalCompression(4, block_size=16),
}
SPECS = {"stack": P(None, None, "model"), "w": P("model", None), "b": P()}


def refused(choice):
    """What the error says, of the combinations that are refused."""
    if choice["selection"] == "top_k" and choice["shards"]:
        return "selection=TopK.* and param_specs cannot both be given"
    return None


def optimizer(choice):
    rate = optax.linear_schedule(0.2, 0.0, STEPS)
    selection, ratio = choice["selection"], 0.25
    if selection == "by phase":
        selection, ratio = "strided", {0: 0.5, 6: 0.25}
    tx = slamb_jax.slamb(
        rate,
        axis_name="data",
        local_axis_name="device" if choice["groups"] else None,
        compress_ratio=ratio,
        selection=selection,
        min_size=0,
        b3=0.7,
        # A gradient in bfloat16 can be 0, and v with it, where the mean m is not.
        eps=1e-3,
        sync_every=5,
        payload=CODES.get(choice["payload"], choice["payload"]),
        average_payload=CODES.get(choice["average_payload"], choice["average_payload"]),
        param_specs=SPECS if choice["shards"] else None,
        stacked={"stack": True, "w": False, "b": False} if choice["stacked"] else None,
        **{k: choice[k] for k in ("form", "mu_dtype", "nu_of", "nu_dtype", "overlap")},
    )
    workers = ("data", "device", "model")
    match choice["wrapped"]:
        case "skip":
            return slamb_jax.skip_not_finite(tx, workers)
        case "master" | "stochastic" as rounding:
            return slamb_jax.train_in_bfloat16(tx, rounding=rounding)
        case "accumulate":
            return slamb_jax.accumulate(tx, 2)
    return tx


def distance_left(choice):
    """How far 8 devices end from the mean of their targets, as a share of the way."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "device", "model"))
    tx = optimizer(choice)
    narrow = choice["wrapped"] in ("master", "stochastic")
    dtype = jnp.bfloat16 if narrow else jnp.float32
    steps = STEPS * (2 if choice["wrapped"] == "accumulate" else 1)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"stack": (3, 8, 16), "w": (16, 8), "b": (8,)}
    goal = {
        name: jax.random.normal(key, shape)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    specs = SPECS if choice["shards"] else jax.tree.map(lambda _: P(), SPECS)

    def train(goal):
        worker = 2 * lax.axis_index("data") - 1 + 0.0
        if choice["groups"]:  # its devices pull apart too
            worker = worker + 2 * lax.axis_index("device") - 1
        own = jax.tree.map(lambda x: x * (1 + 0.5 * worker), goal)
        start = jax.tree.map(lambda x: jnp.flip(x).astype(dtype), goal)

        def step(carry, _):
            params, state = carry
            wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
            grads = jax.tree.map(lambda p, x: (p - x).astype(dtype), wide, own)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params, _ = lax.scan(step, (start, tx.init(start)), length=steps)[0]
        mean = slamb_jax.average_parameters(params, ("data", "device"))
        left = jax.tree.map(lambda p, x: p.astype(jnp.float32) - x, mean, goal)
        whole = jax.tree.map(lambda p, x: p.astype(jnp.float32) - x, start, goal)
        return norm(left) / norm(whole)

    with jax.numpy_dtype_promotion("standard"):
        run = jax.shard_map(
            train, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
        )
        return float(jax.jit(run)(goal))


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def check(choice):
    if reason := refused(choice):
        with pytest.raises(ValueError, match=reason):
            distance_left(choice)
        return
    assert distance_left(choice) < 0.5, choice


def pairs_of(choice):
    return set(itertools.combinations(sorted(choice.items(), key=lambda x: x[0]), 2))


def all_pairs(seed=0, tries=60):
    """Combinations in which each value of a choice meets each of every other."""
    rng = random.Random(seed)
    axes = itertools.combinations(sorted(CHOICES), 2)
    missing = {
        ((a, x), (b, y))
        for a, b in axes
        for x, y in itertools.product(CHOICES[a], CHOICES[b])
    }
    found = []
    while missing:
        seeds = [dict(rng.choice(sorted(missing, key=str))) for _ in range(tries)]
        candidates = [
            {name: rng.choice(values) for name, values in CHOICES.items()} | seed
            for seed in seeds
        ]
        best = max(candidates, key=lambda c: len(pairs_of(c) & missing))
        missing -= pairs_of(best)
        found.append(best)
    return found


def name_of(choice):
    told = [f"{k}={v}" for k, v in choice.items() if v != DEFAULT[k]]
    return ",".join(told) or "default"


TOGETHER = [
    {"selection": "top_k", "payload": "uniform8", "overlap": True, "groups": True},
    {"payload": "uniform4", "shards": True, "stacked": True, "wrapped": "master"},
    {"selection": "by phase", "average_payload": "uniform8", "wrapped": "skip"},
    {"selection": "top_k", "shards": True},
]


@pytest.mark.parametrize("choice", [DEFAULT | c for c in TOGETHER], ids=name_of)
def test_choices_together(choice):
    check(choice)


@pytest.mark.long
@pytest.mark.parametrize("choice", all_pairs(), ids=name_of)
def test_grid_of_choices(choice):
    check(choice)
