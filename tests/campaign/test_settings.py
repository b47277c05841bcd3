"""Any two settings of an exchange, in any place: five steps, and what must hold."""

from typing import Any

import chex
import jax
import numpy as np
import pytest

import slamb_jax
from slamb_jax.exchange import codes as _codes
from tests.campaign import settings
from tests.campaign.draws import SEED, TIMES
from tests.campaign.settings import CODES, DEFAULT, FACTORS, RANDOM, SIZES
from tests.close import assert_agree_but, assert_close, assert_same_bits
from tests.optimizers import standard_promotion
from tests.pairwise import Row, name_of, pairwise
from tests.shards import OLD

pytestmark = pytest.mark.usefixtures("standard_promotion")

REFUSED = """
axes-layout axes-mapping b3-large b3-nesterov b3-optimizer b3-outer b3-payload
b3-selection check_vma-mapping form-nesterov form-optimizer large-payload
large-selection large-sync_every layout-mapping nesterov-optimizer
nesterov-selection nesterov-sync_every nu_dtype-optimizer optimizer-selection
optimizer-sync_every optimizer-weight_decay outer-payload outer-selection
outer-sync_every payload-selection payload-sync_every selection-sync_every
"""  # settings of which some values exclude each other, or leave one nothing to say
QUICK: list[Row] = [
    {"mapping": "shard_map", "layout": "groups", "optimizer": "slamb"},
    {"mapping": "pmap", "payload": "uniform4", "outer": True, "sync_every": 3},
    {"layout": "shards", "payload": None, "optimizer": "slamb", "form": "product"},
    {
        "mapping": "shard_map", "layout": "groups of shards", "selection": True,
        "payload": None, "optimizer": "slamb", "b3": 0.7, "weight_decay": 0.1,
    },
]  # fmt: skip
with standard_promotion():
    COVERED = [
        pairwise(FACTORS, settings.settled, seed)
        for seed in range(SEED, SEED + max(1, TIMES))
    ]
ROWS = [DEFAULT | row for row in QUICK]
ROWS += [row for rows, _ in COVERED for row in rows]


def case(i: int, row: Row) -> Any:
    marks = [pytest.mark.long] if i >= len(QUICK) else []
    return pytest.param(row, id=name_of(row, DEFAULT), marks=marks)


@pytest.mark.parametrize("row", [case(i, row) for i, row in enumerate(ROWS)])
def test_any_two_settings_together(row: Row, monkeypatch: Any) -> None:
    if OLD and "shards" in row["layout"] and row["mapping"] == "per_worker_step":
        pytest.skip("axes that are left to the compiler need a jax newer than 0.7")
    monkeypatch.setattr(_codes, "_LARGE", row["large"])
    state = one_of_each_group(row, settings.run_in_place(row))
    chex.assert_tree_all_finite(state)
    assert_what_agrees(row, state)
    if is_comparable(row):
        assert_as_simulated(row, state)


def test_nothing_else_is_refused() -> None:
    for rows, impossible in COVERED:
        assert len(rows) < 100
        found = {"-".join(name for name, _ in pair) for pair in impossible}
        assert found == set(REFUSED.split())


def one_of_each_group(row: Row, state: Any) -> Any:
    """The state of each worker, from devices that all hold the same bits."""
    workers, width, _ = SIZES[row["layout"]]
    if row["mapping"] in ("vmap", "pmap") and width > 1:
        one, other = (jax.tree.map(lambda x, i=i: x[:, i], state) for i in (0, 1))
        assert_same_bits(one, other)
        return one
    chex.assert_tree_shape_prefix(state, (workers,))
    for x in jax.tree.leaves(state):
        copies: dict[str, bytes] = {}
        for shard in x.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert copies.setdefault(str(shard.index), bits) == bits
    return state


def assert_what_agrees(row: Row, state: Any) -> None:
    """To the bit: all but momenta, or where workers drift apart counts and anchors."""
    mean_first = row["sync_every"] == 1 and not (row["outer"] or row["selection"])
    of_worker = ["mu", "mean"]  # momenta and what is accumulated
    if row["optimizer"] == "muon" and row["payload"] in set(CODES) - {"uniform8"}:
        of_worker += ["nu", "nu_mean"]  # directions of each worker's own
    assert_agree_but(state, of_worker, drifts=not mean_first)
    whole = row["wrapped"] in (None, "skip") and not row["overlap"]
    if row["sync_every"] == 1 and whole:  # just averaged
        slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)


def is_comparable(row: Row) -> bool:
    """Whether the layout changes neither what is chosen nor what is drawn."""
    if row["layout"] in ("workers", "one"):
        return True
    if row["layout"] == "groups":
        return row["payload"] not in RANDOM
    # Codes have blocks of a shard, and rounding draws by the place in it.
    drawn = row["wrapped"] == "stochastic" or row["nu_dtype"] is not None
    return not (row["payload"] in CODES or drawn)


def assert_as_simulated(row: Row, state: Any) -> None:
    want = settings.simulated(row)
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    whole = row["layout"] in ("workers", "one")  # sums of a group have another order
    units = 4096 if row["optimizer"] == "muon" else 64 if whole else 256
    in_float32 = {row[k] for k in ("payload", "mu_dtype", "nu_dtype")} == {None}
    if in_float32 and row["wrapped"] not in ("master", "stochastic"):
        assert_close(state, want, units=units)
        return
    # Numbers that differ in the last place may be rounded to others.
    off = total = 0
    for a, b in zip(*map(jax.tree.leaves, (state, want)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        room = units * 2.0**-23 * max(0.1, np.abs(b).max(initial=0))
        off += int((np.abs(a - b) > room).sum())
        total += a.size
    assert off <= (0.01 if whole else 0.03) * total
