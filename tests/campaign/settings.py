"""A row of settings as an exchange, an optimizer, and a run of it in its place."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import slamb_jax
from slamb_jax.exchange.selections import Strided
from tests.optimizers import random_tree, step_on_gradients
from tests.pairwise import Row
from tests.shards import Tiled, in_shard_map, mesh_with
from tests.workers import P, stack

STEPS, CHOICE = 5, Strided(0.25, min_size=0)
DETERMINISTIC, RANDOM = ("ternary", "largest_of_7"), ("uniform8", "uniform4")
CODES = DETERMINISTIC + RANDOM
FACTORS: dict[str, tuple[Any, ...]] = {  # of each the default first
    "mapping": ("per_worker_step", "shard_map", "vmap", "pmap"),
    "layout": ("workers", "one", "groups", "shards", "groups of shards"),
    "check_vma": (True, False),
    "axes": ("auto", "explicit"),
    "large": (2**16, 64),  # elements from which an array is encoded by itself
    "payload": ("ternary", None, "bfloat16", "largest_of_7", "uniform8", "uniform4"),
    "sync_every": (1, 3, None),
    "outer": (False, True),
    "overlap": (False, True),
    "selection": (False, True),
    "stacked": (False, True),
    "optimizer": ("adamw", "slamb", "lion", "muon", "sgd"),
    "form": ("sum", "product"),
    "b3": (1.0, 0.7),
    "nesterov": (False, True),
    "weight_decay": (0.0, 0.1),
    "mu_dtype": (None, "bfloat16"),
    "nu_dtype": (None, "bfloat16"),
    "wrapped": (None, "skip", "master", "stochastic", "accumulate"),
}
DEFAULT: Row = {name: values[0] for name, values in FACTORS.items()}
SPECS = {
    "stack": P(None, None, "model"), "layers": P("model"), "w": P("model", None),
    "b": P(), "s": None, "empty": P(),
}  # fmt: skip
SHAPES = {
    "stack": (3, 8, 16), "layers": (2, 3, 8), "w": (16, 8), "b": (8,), "s": (),
    "empty": (0, 3),
}  # fmt: skip
SIZES = {  # workers, devices of each, shards
    "workers": (4, 1, 1),
    "one": (1, 1, 1),
    "groups": (2, 2, 1),
    "shards": (2, 1, 2),
    "groups of shards": (2, 2, 2),
}
LAYOUTS = {  # of a mapping that cannot have all
    "pmap": ("workers", "one", "groups"),
    "vmap": ("workers", "one", "groups"),
    "per_worker_step": ("workers", "one", "groups", "shards"),
}
SAYS = {  # where a setting has something to say
    "form": lambda row: row["optimizer"] == "slamb",
    "nu_dtype": lambda row: row["optimizer"] in ("adamw", "slamb"),
    "nesterov": lambda row: row["optimizer"] in ("adamw", "sgd", "muon"),
    "weight_decay": lambda row: row["optimizer"] != "sgd",
    "b3": lambda row: row["selection"],
    "check_vma": lambda row: row["mapping"] in ("per_worker_step", "shard_map"),
    "axes": lambda row: row["mapping"] == "per_worker_step",
    "large": lambda row: row["payload"] in CODES,
}
REFUSING = ("payload", "sync_every", "outer", "selection", "optimizer", "layout")
ARGUMENTS = {  # of an optimizer
    "adamw": ("weight_decay", "nesterov", "mu_dtype", "nu_dtype"),
    "lion": ("weight_decay", "mu_dtype"),
    "muon": ("weight_decay", "nesterov", "mu_dtype"),
    "sgd": ("nesterov",),
    "slamb": ("form", "b3", "weight_decay", "mu_dtype", "nu_dtype"),
}


def exchange(row: Row) -> slamb_jax.Exchange:
    _, width, shards = SIZES[row["layout"]]
    return slamb_jax.Exchange(
        "data",
        outer=optax.sgd(0.7, momentum=0.5, nesterov=True) if row["outer"] else None,
        selection=CHOICE if row["selection"] else None,
        local_axis_name="device" if width > 1 else None,
        param_specs=SPECS if shards > 1 else None,
        stacked={k: k in ("stack", "layers") for k in SHAPES}
        if row["stacked"]
        else None,
        **{name: row[name] for name in ("payload", "sync_every", "overlap")},
    )


def optimizer(row: Row, between: slamb_jax.Exchange) -> Any:
    given = {name: row[name] for name in ARGUMENTS[row["optimizer"]]}
    if row["optimizer"] == "sgd":
        given |= {"accumulator_dtype": row["mu_dtype"], "momentum": 0.9}
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
    if row["sync_every"] is None and "selection" not in fixed:
        row = row | {"selection": True}
    needs: Row = {}
    if row["selection"]:
        needs = {"payload": None, "outer": False, "optimizer": "slamb"}
    elif row["sync_every"] == 3 and not row["outer"]:
        needs = {"payload": None}
    row = row | {name: x for name, x in needs.items() if name not in fixed}
    for name, says in SAYS.items():
        if not says(row) and row[name] != DEFAULT[name]:
            if name in fixed:
                return None
            row = row | {name: DEFAULT[name]}
    if row["layout"] not in LAYOUTS.get(row["mapping"], SIZES):
        return None
    typed = row["mapping"] == "shard_map" and row["check_vma"]
    if typed and SIZES[row["layout"]][1] > 1 and row["wrapped"] == "accumulate":
        return None  # types tell twice that the group averaged; per_worker_step varies
    return row if is_accepted(*(row[name] for name in REFUSING)) else None


@functools.cache
def is_accepted(*values: Any) -> bool:
    row = DEFAULT | dict(zip(REFUSING, values, strict=True))
    try:
        optimizer(row, exchange(row))
    except ValueError:
        return False
    return True


def gradients(row: Row) -> list[Any]:
    """Of each device, group by group; in a run that skips one of them is poisoned."""
    workers, width, _ = SIZES[row["layout"]]
    grads = [random_tree(SHAPES, 1 + t, workers * width) for t in range(STEPS)]
    if row["wrapped"] == "skip":
        grads[2]["w"] = grads[2]["w"].at[-1, 3, 5].set(np.nan)
    return jax.tree.map(lambda g: g.astype(dtype_of(row)), grads)


def dtype_of(row: Row) -> str:
    return "bfloat16" if row["wrapped"] in ("master", "stochastic") else "float32"


def start(row: Row, tx: Any) -> Any:
    params = jax.tree.map(lambda x: x.astype(dtype_of(row)), random_tree(SHAPES, 0))
    return params, jax.jit(tx.init)(params)


def run_in_place(row: Row) -> Any:
    """The state of all workers in the end, as its mapping leaves it."""
    between = exchange(row)
    tx = optimizer(row, between)
    mapped = _mapped if row["mapping"] in ("vmap", "pmap") else _on_mesh
    run, before = mapped(step_on_gradients(tx), row, between, start(row, tx))
    state = before
    for g in gradients(row):
        state, _ = run(state, g)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, before)
    return jax.block_until_ready(state)


def simulated(row: Row) -> Any:
    """The same run of simulated workers, each one device with a whole model."""
    workers, width, shards = SIZES[row["layout"]]
    between = dataclasses.replace(exchange(row), local_axis_name=None, param_specs=None)
    if row["selection"] and shards > 1:  # which chooses in each shard
        chosen = Tiled(CHOICE, tuple(SPECS[name] for name in sorted(SPECS)))
        between = dataclasses.replace(between, selection=chosen)
    tx = optimizer(row, between)
    state = slamb_jax.simulated_replicas(start(row, tx), workers)
    run = slamb_jax.simulated_step(step_on_gradients(tx), workers, between)
    for g in gradients(row):
        if width > 1:
            g = jax.tree.map(lambda x: mean_of_groups(x, workers), g)
        state, _ = run(state, g)
    return state


def mean_of_groups(x: jax.Array, groups: int) -> jax.Array:
    """In float32: what is averaged over a group is not rounded before it is used."""
    shape = (groups, len(x) // groups, *x.shape[1:])
    return x.astype(jnp.float32).reshape(shape).mean(1)


def _mesh(row: Row) -> Mesh:
    sizes = dict(zip(("data", "device", "model"), SIZES[row["layout"]], strict=True))
    sizes = {name: n for name, n in sizes.items() if name == "data" or n > 1}
    kind = AxisType.Explicit if row["axes"] == "explicit" else AxisType.Auto
    return mesh_with(sizes, kind)


def _on_mesh(step: Any, row: Row, between: Any, state: Any) -> Any:
    mesh, check_vma = _mesh(row), row["check_vma"]
    state = slamb_jax.replicate(state, mesh, between)
    if row["mapping"] == "shard_map":  # as the documentation of sharded models has it
        specs = SPECS if "model" in mesh.axis_names else dict.fromkeys(SHAPES)
        return in_shard_map(step, mesh, state, specs, check_vma), state
    run = slamb_jax.per_worker_step(step, mesh, between, check_vma=check_vma)
    return run, state


def _mapped(step: Any, row: Row, between: Any, state: Any) -> Any:
    """By ``vmap`` or ``pmap``; of groups, each device has its own copy of the state."""
    del between
    workers, width, _ = SIZES[row["layout"]]

    def run(state: Any, g: Any) -> Any:
        return step(state, jax.tree.map(lambda x: x[None], g))

    if width > 1:
        run, state = jax.vmap(run, axis_name="device"), stack(state, width)
    if row["mapping"] == "vmap":
        mapped = jax.jit(jax.vmap(run, axis_name="data"))
    else:
        mapped = jax.pmap(run, axis_name="data", devices=jax.devices()[:workers])
    lead = (workers, width) if width > 1 else (workers,)

    def split(state: Any, g: Any) -> Any:
        return mapped(state, jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), g))

    return split, stack(state, workers)
