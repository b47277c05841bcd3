"""Any two settings of an exchange, in any place: five steps, and what must hold."""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import slamb_jax
from slamb_jax.exchange import codecs as _codecs
from slamb_jax.exchange.selections import Leaf, Strided
from tests.campaign.draws import SEED, TIMES, name_of, pairwise
from tests.close import assert_agree_but, assert_close, assert_same_bits
from tests.optimizers import random_tree, standard_promotion, step_on_gradients
from tests.replay import Replay, mask_at
from tests.shards import in_shard_map, mesh_with
from tests.workers import P, over_workers, stack

pytestmark = pytest.mark.usefixtures("standard_promotion")

STEPS, CHOICE = 5, Strided(0.25, min_size=0)
DETERMINISTIC, RANDOM = ("ternary", "largest_of_7"), ("uniform8", "uniform4")
CODES = DETERMINISTIC + RANDOM
FACTORS = {  # of each the default first
    "mapping": ("per_worker_step", "shard_map", "vmap", "pmap"),
    "layout": ("workers", "one", "groups", "shards", "groups of shards"),
    "check_vma": (True, False),
    "axes": ("auto", "explicit"),
    "large": (2**16, 64),  # elements from which an array is encoded by itself
    "payload": ("ternary", None, "bfloat16", "largest_of_7", "uniform8", "uniform4"),
    "sync_every": (1, 3, None),
    "outer": (False, True),
    "route": ("owners", "all"),
    "selection": (False, True),
    "stacked": (False, True),
    "optimizer": ("adamw", "slamb", "lamb", "lion", "muon", "sgd"),
    "form": ("sum", "product"),
    "b3": (1.0, 0.7),
    "nesterov": (False, True),
    "weight_decay": (0.0, 0.1),
    "mu_dtype": (None, "bfloat16"),
    "wrapped": (None, "skip", "accumulate"),
}
DEFAULT = {name: values[0] for name, values in FACTORS.items()}
SPECS = {
    "stack": P(None, None, "model"), "layers": P("model"), "w": P("model", None),
    "b": P(), "s": None, "empty": P(),
}  # fmt: skip
SHAPES = {
    "stack": (3, 8, 16), "layers": (2, 3, 8), "w": (16, 8), "b": (8,), "s": (),
    "empty": (0, 3),
}  # fmt: skip
SIZES = {  # workers, devices of each, shards
    "workers": (4, 1, 1), "one": (1, 1, 1), "groups": (2, 2, 1), "shards": (2, 1, 2),
    "groups of shards": (2, 2, 2),
}  # fmt: skip
STACKED = ("stack", "layers")
UNSHARDED = ("workers", "one", "groups")
LAYOUTS = {  # of a mapping that cannot have all
    "pmap": UNSHARDED, "vmap": UNSHARDED, "per_worker_step": (*UNSHARDED, "shards")
}  # fmt: skip
OF_OPTIMIZER = ("form", "b3", "nesterov", "weight_decay")


@functools.cache
def arguments(optimizer):
    return set(inspect.signature(getattr(slamb_jax, optimizer)).parameters)


SAYS = {  # where a setting has something to say
    "check_vma": lambda row: row["mapping"] in ("per_worker_step", "shard_map"),
    "axes": lambda row: row["mapping"] == "per_worker_step",
    "large": lambda row: row["payload"] in CODES,
}
SAYS |= {
    name: lambda row, name=name: name in arguments(row["optimizer"])
    for name in OF_OPTIMIZER
}
REFUSING = ("payload", "sync_every", "outer", "selection", "optimizer", "layout")


def exchange(row):
    _, width, shards = SIZES[row["layout"]]
    stacked = {name: name in STACKED for name in SHAPES}
    return slamb_jax.Exchange(
        "data",
        outer=optax.sgd(0.7, momentum=0.5, nesterov=True) if row["outer"] else None,
        selection=CHOICE if row["selection"] else None,
        local_axis_name="device" if width > 1 else None,
        param_specs=SPECS if shards > 1 else None,
        stacked=stacked if row["stacked"] else None,
        **{name: row[name] for name in ("payload", "sync_every", "route")},
    )


def optimizer(row, between):
    kind = row["optimizer"]
    given = {name: row[name] for name in OF_OPTIMIZER if name in arguments(kind)}
    given["accumulator_dtype" if kind == "sgd" else "mu_dtype"] = row["mu_dtype"]
    if kind == "sgd":
        given["momentum"] = 0.9
    if kind in ("adamw", "slamb", "lamb"):
        # A gradient can be near 0, and v with it, where the mean m is not.
        given["eps"] = 1e-3
    rate = optax.linear_schedule(0.1, 0.05, STEPS)
    tx = getattr(slamb_jax, kind)(rate, between, **given)
    match row["wrapped"]:
        case "skip":
            return slamb_jax.skip_not_finite(tx, between)
        case "accumulate" if between.local_axis_name is None:
            return slamb_jax.accumulate(tx, 2)
        case "accumulate":
            average = slamb_jax.average_gradients(between)
            return optax.chain(average, slamb_jax.accumulate(tx, 2))
    return tx


def settled(row, fixed):
    """The row without settings that have nothing to say; None if it cannot be made."""
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
def is_accepted(*values):
    row = DEFAULT | dict(zip(REFUSING, values, strict=True))
    try:
        optimizer(row, exchange(row))
    except ValueError:
        return False
    return True


def gradients(row):
    """Of each device, group by group; in a run that skips one of them is poisoned."""
    workers, width, _ = SIZES[row["layout"]]
    grads = [random_tree(SHAPES, 1 + t, workers * width) for t in range(STEPS)]
    if row["wrapped"] == "skip":
        grads[2]["w"] = grads[2]["w"].at[-1, 3, 5].set(np.nan)
    return grads


def start(row, between):
    """The step of one worker, and its state."""
    tx = optimizer(row, between)
    params = random_tree(SHAPES, 0)
    return step_on_gradients(tx), (params, jax.jit(tx.init)(params))


def run_in_place(row):
    """The state of all workers in the end, as its mapping leaves it."""
    between = exchange(row)
    mapped = _mapped if row["mapping"] in ("vmap", "pmap") else _on_mesh
    run, before = mapped(*start(row, between), row, between)
    state = before
    for g in gradients(row):
        state, _ = run(state, g)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, before)
    return jax.block_until_ready(state)


def simulated(row):
    """The same run of simulated workers, each one device with a whole model."""
    workers, width, shards = SIZES[row["layout"]]
    between = dataclasses.replace(exchange(row), local_axis_name=None, param_specs=None)
    if row["selection"] and shards > 1:  # which chooses in each shard
        between = dataclasses.replace(between, selection=tiled(row, shards))
    step, state = start(row, between)
    state = slamb_jax.simulated_replicas(state, workers)
    run = slamb_jax.simulated_step(step, workers, between)

    def mean_of_groups(x):
        """In float32: what a group averages is not rounded before it is used."""
        return x.astype(jnp.float32).reshape(workers, width, *x.shape[1:]).mean(1)

    for g in gradients(row):
        state, _ = run(state, jax.tree.map(mean_of_groups, g) if width > 1 else g)
    return state


def tiled(row, shards):
    """On unsharded leaves, the choice that is made in their shards."""
    masks = []
    for i, (name, shape) in enumerate(sorted(SHAPES.items())):
        parts = [shards if axis else 1 for axis in SPECS[name] or ()]
        parts += [1] * (len(shape) - len(parts))
        own = tuple(n // c for n, c in zip(shape, parts, strict=True))
        leaf = Leaf(i, own, row["stacked"] and name in STACKED)
        at_steps = [mask_at(CHOICE, leaf, t + 1) for t in range(STEPS)]
        masks.append(np.tile(at_steps, parts).reshape(STEPS, -1))
    return Replay(masks)


def _on_mesh(step, state, row, between):
    sizes = dict(zip(("data", "device", "model"), SIZES[row["layout"]], strict=True))
    sizes = {name: n for name, n in sizes.items() if name == "data" or n > 1}
    kind = AxisType.Explicit if row["axes"] == "explicit" else AxisType.Auto
    mesh, check_vma = mesh_with(sizes, kind), row["check_vma"]
    state = slamb_jax.replicate(state, mesh, between)
    if row["mapping"] == "shard_map":  # as the documentation of sharded models has it
        specs = SPECS if "model" in mesh.axis_names else dict.fromkeys(SHAPES)
        return in_shard_map(step, mesh, state, specs, check_vma), state
    run = slamb_jax.per_worker_step(step, mesh, between, check_vma=check_vma)
    return run, state


def _mapped(step, state, row, _):
    """By ``vmap`` or ``pmap``; of groups, each device has its own copy of the state."""
    workers, width, _ = SIZES[row["layout"]]

    def run(state, g):
        return step(state, jax.tree.map(lambda x: x[None], g))

    if width > 1:
        run, state = jax.vmap(run, axis_name="device"), stack(state, width)
    mapped = over_workers(run, row["mapping"], workers)
    lead = (workers, width) if width > 1 else (workers,)

    def split(state, g):
        return mapped(state, jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), g))

    return split, stack(state, workers)


def is_comparable(row):
    """Whether the layout changes neither what is chosen nor what is drawn."""
    if row["layout"] in ("workers", "one"):
        return True
    if row["layout"] == "groups":
        # What rounding a mean for all takes of it stays with its owner, which is
        # another worker where groups own the slices.
        at_owner = row["selection"] and row["payload"] in CODES
        return row["payload"] not in RANDOM and not at_owner
    # Codes have blocks of a shard, and rounding draws by the place in it.
    return row["payload"] not in CODES


REFUSED = """
axes-layout axes-mapping b3-nesterov b3-optimizer b3-outer b3-selection
check_vma-mapping form-nesterov form-optimizer large-payload layout-mapping
nesterov-optimizer nesterov-selection nesterov-sync_every
optimizer-outer optimizer-payload optimizer-selection optimizer-sync_every
optimizer-weight_decay outer-payload outer-selection outer-sync_every
selection-sync_every
"""  # settings of which some values exclude each other, or leave one nothing to say
with standard_promotion():
    COVERED = [
        pairwise(FACTORS, settled, seed) for seed in range(SEED, SEED + max(1, TIMES))
    ]
ROWS = [row for rows, _ in COVERED for row in rows]
# The default tests have a row of each layout, whose numbers can be compared.
QUICK = {row["layout"]: row for row in reversed(ROWS) if is_comparable(row)}


def case(row):
    marks = [] if row in QUICK.values() else [pytest.mark.long]
    return pytest.param(row, id=name_of(row, DEFAULT), marks=marks)


@pytest.mark.parametrize("row", [*map(case, ROWS)])
def test_any_two_settings_together(row, monkeypatch):
    monkeypatch.setattr(_codecs, "_LARGE", row["large"])
    state = one_of_each_group(row, run_in_place(row))
    chex.assert_tree_all_finite(state)
    assert_what_agrees(row, state)
    if is_comparable(row):
        assert_as_simulated(row, state)


def test_nothing_else_is_refused():
    for rows, impossible in COVERED:
        assert len(rows) < 100
        found = {"-".join(name for name, _ in pair) for pair in impossible}
        assert found == set(REFUSED.split())


def one_of_each_group(row, state):
    """The state of each worker, from devices that all hold the same bits."""
    workers, width, _ = SIZES[row["layout"]]
    if row["mapping"] in ("vmap", "pmap") and width > 1:
        one, other = (jax.tree.map(lambda x, i=i: x[:, i], state) for i in (0, 1))
        assert_same_bits(one, other)
        return one
    chex.assert_tree_shape_prefix(state, (workers,))
    for x in jax.tree.leaves(state):
        copies = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert copies.setdefault(str(shard.index), bits) == bits
    return state


def assert_what_agrees(row, state):
    """To the bit: all but momenta, or where workers drift apart counts and anchors."""
    mean_first = row["sync_every"] == 1 and not (row["outer"] or row["selection"])
    of_worker = ["mu", "mean"]  # momenta and what is accumulated
    assert_agree_but(state, of_worker, drifts=not mean_first)
    if row["sync_every"] == 1 and row["wrapped"] in (None, "skip"):  # just averaged
        slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)


def assert_as_simulated(row, state):
    want = simulated(row)
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    whole = row["layout"] in ("workers", "one")  # sums of a group have another order
    units = 4096 if row["optimizer"] == "muon" else 64 if whole else 256
    in_float32 = {row[k] for k in ("payload", "mu_dtype")} == {None}
    if in_float32:
        # An outer optimizer's trace is of differences of parameters, which are about 1.
        assert_close(state, want, units=units, floor=0.1 if row["outer"] else 0.0)
        return
    # Numbers that differ in the last place may be rounded to others.
    off = total = 0
    for a, b in zip(*map(jax.tree.leaves, (state, want)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        room = units * 2.0**-23 * max(0.1, np.abs(b).max(initial=0))
        off += int((np.abs(a - b) > room).sum())
        total += a.size
    assert off <= (0.01 if whole else 0.03) * total
