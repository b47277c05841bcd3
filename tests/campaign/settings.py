"""A row of settings as an exchange, an optimizer, and a run of it in its place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import slamb_jax
from tests.optimizers import plain, random_tree, step_on_gradients
from tests.pairwise import Row
from tests.workers import P, stack

STEPS = 5
CODES = {  # blocks that fit the small leaves here
    "uniform8": slamb_jax.payloads.StochasticUniform(block_size=16),
    "uniform4": slamb_jax.payloads.StochasticUniform(
        4, block_size=16, error_feedback=True
    ),
    "ternary": "ternary",
}
PLACE: dict[str, tuple[Any, ...]] = {
    "mapping": ("per_worker_step", "shard_map", "vmap", "pmap"),
    "layout": ("workers", "one", "groups", "shards", "groups of shards"),
    "check_vma": (True, False),
    "axes": ("auto", "explicit"),
    "large": (2**16, 64),  # elements from which an array is encoded by itself
}
OF_EXCHANGE: dict[str, tuple[Any, ...]] = {
    "ratio": (None, 0.25, "by phase"),
    "selection": ("strided", "permutation", "bernoulli"),
    "payload": (None, "bfloat16", *CODES),
    "b3": (1.0, 0.7),
    "overlap": (False, True),
    "sync_every": (1, 3, None),
    "rolling": (None, True, False),
    "average_payload": (None, "bfloat16", *CODES),
    "average_b2": (0.98, None),
    "outer": (False, True),
    "stacked": (False, True),
}
OF_OPTIMIZER: dict[str, tuple[Any, ...]] = {
    "optimizer": ("adamw", "lion", "muon", "sgd", "slamb"),
    "form": ("sum", "product"),
    "weight_decay": (0.0, 0.1),
    "mu_dtype": (None, "bfloat16"),
    "nu_of": ("gradient", "momentum"),
    "nu_dtype": (None, "bfloat16"),
    "wrapped": (None, "skip", "master", "stochastic", "accumulate"),
}
FACTORS = PLACE | OF_EXCHANGE | OF_OPTIMIZER
DEFAULT: Row = {name: values[0] for name, values in FACTORS.items()}
SPECS = {"stack": P(None, None, "model"), "w": P("model", None), "b": P(), "s": P()}
SHAPES = {"stack": (3, 8, 16), "w": (16, 8), "b": (8,), "s": ()}
SIZES = {  # workers, devices of each, shards
    "workers": (4, 1, 1),
    "one": (1, 1, 1),
    "groups": (2, 2, 1),
    "shards": (2, 1, 2),
    "groups of shards": (2, 2, 2),
}
SAYS = {  # where a setting has something to say
    "form": lambda row: row["optimizer"] == "slamb",
    "nu_of": lambda row: row["optimizer"] in ("adamw", "slamb"),
    "nu_dtype": lambda row: row["optimizer"] in ("adamw", "slamb"),
    "weight_decay": lambda row: row["optimizer"] != "sgd",
    "check_vma": lambda row: row["mapping"] in ("per_worker_step", "shard_map"),
    "axes": lambda row: row["mapping"] == "per_worker_step",
    "selection": lambda row: row["ratio"] is not None,
    "payload": lambda row: row["ratio"] is not None,
    "b3": lambda row: row["ratio"] is not None,
    "rolling": lambda row: row["sync_every"] is not None,
    "outer": lambda row: row["sync_every"] is not None,
    "average_payload": lambda row: row["sync_every"] is not None,
    "average_b2": lambda row: row["average_payload"] is not None,
    "large": lambda row: {row["payload"], row["average_payload"]} & CODES.keys(),
}


def exchange(row: Row) -> slamb_jax.Exchange:
    _, width, shards = SIZES[row["layout"]]
    ratio = {0: 0.5, 2: 0.25} if row["ratio"] == "by phase" else row["ratio"]
    names = ("selection", "b3", "overlap", "sync_every", "rolling", "average_b2")
    return plain(
        "data",
        local_axis_name="device" if width > 1 else None,
        compress_ratio=ratio,
        min_size=0,
        payload=CODES.get(row["payload"], row["payload"]),
        average_payload=CODES.get(row["average_payload"], row["average_payload"]),
        outer=optax.sgd(0.7, momentum=0.5, nesterov=True) if row["outer"] else None,
        param_specs=SPECS if shards > 1 else None,
        stacked={k: k == "stack" for k in SHAPES} if row["stacked"] else None,
        **{name: row[name] for name in names},
    )


def optimizer(row: Row, between: slamb_jax.Exchange) -> Any:
    names = {
        "adamw": ("weight_decay", "mu_dtype", "nu_of", "nu_dtype"),
        "lion": ("weight_decay", "mu_dtype"),
        "muon": ("weight_decay", "mu_dtype"),
        "sgd": ("mu_dtype",),
        "slamb": ("form", "weight_decay", "mu_dtype", "nu_of", "nu_dtype"),
    }[row["optimizer"]]
    given = {name: row[name] for name in names}
    if row["optimizer"] == "sgd":
        given = {"accumulator_dtype": given["mu_dtype"], "momentum": 0.9}
    if row["optimizer"] in ("adamw", "slamb"):
        # A gradient in bfloat16 can be 0, and v with it, where the mean m is not.
        given["eps"] = 1e-3
    rate = optax.linear_schedule(0.1, 0.05, STEPS)
    tx = getattr(slamb_jax, row["optimizer"])(rate, between, **given)
    match row["wrapped"]:
        case "skip":
            return slamb_jax.skip_not_finite(tx, between)
        case "master" | "stochastic" as rounding:
            return slamb_jax.train_in_bfloat16(tx, rounding)
        case "accumulate":
            tx = slamb_jax.accumulate(tx, 2)
            if between.local_axis_name is None:
                return tx
            return optax.chain(slamb_jax.average_gradients(between), tx)
    return tx


def settled(row: Row, fixed: set[str]) -> Row | None:
    """The row without settings that have nothing to say; None if it cannot be made."""
    for name, says in SAYS.items():
        if not says(row) and row[name] != DEFAULT[name]:
            if name in fixed:
                return None
            row = row | {name: DEFAULT[name]}
    layouts = {
        "pmap": ("workers", "one"),
        "vmap": ("workers", "one", "groups"),
        "per_worker_step": ("workers", "one", "groups", "shards"),
    }
    if row["layout"] not in layouts.get(row["mapping"], SIZES):
        return None
    typed = row["mapping"] == "shard_map" and row["check_vma"]
    if typed and SIZES[row["layout"]][1] > 1 and row["wrapped"] == "accumulate":
        return None  # types tell twice that the group averaged; per_worker_step varies
    try:
        optimizer(row, exchange(row))
    except ValueError:
        return None
    return row


def gradients(row: Row) -> list[Any]:
    """Of each device, group by group; in a run that skips one of them is poisoned."""
    workers, width, _ = SIZES[row["layout"]]
    grads = [random_tree(SHAPES, 1 + t, workers * width) for t in range(STEPS)]
    if row["wrapped"] == "skip":
        grads[2]["w"] = grads[2]["w"].at[-1, 3, 5].set(np.nan)
    if row["wrapped"] in ("master", "stochastic"):
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    return grads


def start(row: Row, tx: Any) -> Any:
    dtype = "float32"
    if row["wrapped"] in ("master", "stochastic"):
        dtype = "bfloat16"
    params = jax.tree.map(lambda x: x.astype(dtype), random_tree(SHAPES, 0))
    return params, jax.jit(tx.init)(params)


def run_in_place(row: Row) -> Any:
    """The state of all workers in the end, as its mapping leaves it."""
    between = exchange(row)
    tx = optimizer(row, between)
    step, make = step_on_gradients(tx), MAPPED[row["mapping"]]
    run, state = make(step, row, between, start(row, tx))
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for g in gradients(row):
        state = run(state, g)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    return jax.block_until_ready(state)


def mean_of_groups(x: jax.Array, groups: int) -> jax.Array:
    """In float32: what is averaged over a group is not rounded before it is used."""
    x = x.astype(jnp.float32)
    return x.reshape(groups, -1, *x.shape[1:]).mean(1)


def simulated(row: Row, **settings: Any) -> Any:
    """The same run of simulated workers, each one device with a whole model."""
    between = dataclasses.replace(
        exchange(row), local_axis_name=None, param_specs=None, **settings
    )
    tx = optimizer(row, between)
    workers, width, _ = SIZES[row["layout"]]
    state = slamb_jax.simulated_replicas(start(row, tx), workers)
    run = slamb_jax.simulated_step(step_on_gradients(tx), workers, between)
    for g in gradients(row):
        if width > 1:
            g = jax.tree.map(lambda x: mean_of_groups(x, workers), g)
        state, _ = run(state, g)
    return state


def _mesh(row: Row) -> Mesh:
    sizes = SIZES[row["layout"]]
    names = ("data", "device", "model")
    kept = [i for i in range(3) if i == 0 or sizes[i] > 1]
    shape = [sizes[i] for i in kept]
    kind = AxisType.Explicit if row["axes"] == "explicit" else AxisType.Auto
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, [names[i] for i in kept], axis_types=(kind,) * len(kept))


def _per_worker_step(
    step: Callable[..., Any], row: Row, between: slamb_jax.Exchange, state: Any
) -> Any:
    mesh = _mesh(row)
    run = slamb_jax.per_worker_step(step, mesh, between, check_vma=row["check_vma"])
    state = slamb_jax.replicate(state, mesh, between)
    return (lambda state, g: run(state, g)[0]), state


def _shard_map(
    step: Callable[..., Any], row: Row, between: slamb_jax.Exchange, state: Any
) -> Any:
    """Manual over all axes, as the documentation of sharded models has it."""
    mesh = _mesh(row)
    state = slamb_jax.replicate(state, mesh, between)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    lead = ("data", "device") if "device" in mesh.axis_names else ("data",)
    of_model = SPECS if "model" in mesh.axis_names else {k: P() for k in SHAPES}
    of_batch = {k: P(lead, *of_model[k]) for k in SHAPES}

    def one_of_many(state: Any, g: Any) -> Any:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), state)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), step(own, g)[0])

    run = jax.shard_map(
        one_of_many,
        mesh=mesh,
        in_specs=(specs, of_batch),
        out_specs=specs,
        check_vma=row["check_vma"],
    )
    return jax.jit(run), state


def _pmap(
    step: Callable[..., Any], row: Row, between: slamb_jax.Exchange, state: Any
) -> Any:
    n = SIZES[row["layout"]][0]
    devices = jax.devices()[:n]

    def one_of_many(state: Any, g: Any) -> Any:
        return step(state, jax.tree.map(lambda x: x[None], g))[0]

    run = jax.pmap(one_of_many, axis_name="data", devices=devices)
    return run, stack(state, n)


def _vmap(
    step: Callable[..., Any], row: Row, between: slamb_jax.Exchange, state: Any
) -> Any:
    """Of groups, each device has its own copy of the state."""
    workers, width, _ = SIZES[row["layout"]]

    def one_of_many(state: Any, g: Any) -> Any:
        return step(state, jax.tree.map(lambda x: x[None], g))[0]

    if width == 1:
        return jax.jit(jax.vmap(one_of_many, axis_name="data")), stack(state, workers)
    both = jax.vmap(jax.vmap(one_of_many, axis_name="device"), axis_name="data")
    jitted = jax.jit(both)

    def run(state: Any, g: Any) -> Any:
        g = jax.tree.map(lambda x: x.reshape(workers, width, *x.shape[1:]), g)
        return jitted(state, g)

    return run, stack(stack(state, width), workers)


MAPPED = {
    "per_worker_step": _per_worker_step,
    "shard_map": _shard_map,
    "pmap": _pmap,
    "vmap": _vmap,
}
