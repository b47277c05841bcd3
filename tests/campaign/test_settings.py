"""Any two settings of an exchange, in any place: five steps, and what must hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slamb_jax._ex.payloads import codes

import slamb_jax
from slamb_jax.workers.checksums import differing_copies
from tests.campaign.draws import SEED, TIMES
from tests.campaign.settings import (
    CODES,
    DEFAULT,
    FACTORS,
    SAYS,
    SIZES,
    run_in_place,
    settled,
    simulated,
)
from tests.close import assert_close
from tests.forms import part
from tests.optimizers import standard_promotion
from tests.pairwise import Row, name_of, pairwise

pytestmark = pytest.mark.usefixtures("standard_promotion")

FEW = 2
SEEDS = range(SEED, SEED + max(1, TIMES))
REFUSED = {  # though both have something to say
    ("outer", "rolling"),
    ("ratio", "sync_every"),
}
with standard_promotion():
    COVERED = [pairwise(FACTORS, settled, seed) for seed in SEEDS]
ROWS = [row for rows, _ in COVERED for row in rows]


def case(i: int, row: Row) -> Any:
    marks = [pytest.mark.long] if i % len(COVERED[0][0]) >= FEW else []
    return pytest.param(row, id=name_of(row, DEFAULT), marks=marks)


@pytest.mark.parametrize("row", [case(i, row) for i, row in enumerate(ROWS)])
def test_any_two_settings_together(row: Row, monkeypatch: Any) -> None:
    monkeypatch.setattr(codes, "_LARGE", row["large"])
    state = one_of_each_group(row, run_in_place(row))
    assert_finite(state)
    assert_what_agrees(row, state)
    assert_as_simulated(row, state)
    assert_conserved(row, state)


def test_nothing_else_is_refused() -> None:
    """A pair that no row can have is one where a setting says nothing, or these."""
    may_be_silent = {*SAYS, "mapping", "layout"}
    for rows, impossible in COVERED:
        assert len(rows) < 100
        for pair in impossible:
            names = tuple(name for name, _ in pair)
            assert names in REFUSED or may_be_silent & set(names), pair


def one_of_each_group(row: Row, state: Any) -> Any:
    """The state of each worker, from devices that all hold the same bits."""
    workers, width, _ = SIZES[row["layout"]]
    if row["mapping"] == "vmap" and width > 1:
        for x in map(np.asarray, jax.tree.leaves(state)):
            np.testing.assert_array_equal(x[:, 0].tobytes(), x[:, 1].tobytes())
        return jax.tree.map(lambda x: x[:, 0], state)
    leaves = jax.tree.leaves(state)
    assert not any(differing_copies(leaves))
    assert {x.shape[0] for x in leaves} == {workers}
    return state


def assert_finite(state: Any) -> None:
    for x in jax.tree.leaves(state):
        assert np.isfinite(np.asarray(x, np.float64)).all()


def assert_what_agrees(row: Row, state: Any) -> None:
    """Counts, the anchor and what is kept with it: to the bit."""
    opt_state = state[1]
    names = "anchor", "average_nu", "average_nu_mean", "outer"
    kept = [part(opt_state, name) for name in names]
    counts = [x for x in jax.tree.leaves(opt_state) if x.dtype == jnp.int32]
    selection = part(opt_state, "selection")
    slamb_jax.assert_replicas_agree([kept, counts, selection])
    whole = row["wrapped"] in (None, "skip") and not row["outer"]
    if row["sync_every"] == 1 and whole and not row["overlap"]:
        rtol = 1e-5 if row["average_payload"] is None else 0.0
        slamb_jax.assert_replicas_agree(state[0], rtol=rtol)


def is_rounded(row: Row) -> bool:
    """Whether numbers that differ in the last place may be rounded to others."""
    narrow = {row[k] for k in ("payload", "average_payload", "mu_dtype", "nu_dtype")}
    return narrow != {None} or row["wrapped"] in ("master", "stochastic")


def is_comparable(row: Row) -> bool:
    """Whether the layout changes neither what is chosen nor what is drawn."""
    if row["layout"] in ("workers", "one"):
        return True
    if any(row[name] in CODES for name in ("payload", "average_payload")):
        return False
    if row["layout"] == "groups":
        return True
    whole = row["ratio"] is None and (row["sync_every"] == 1 or not row["rolling"])
    whole = whole and (row["rolling"] is not None or row["sync_every"] == 1)
    # Stochastic rounding draws by the place in a shard.
    return whole and row["wrapped"] != "stochastic" and row["nu_dtype"] is None


def assert_as_simulated(row: Row, state: Any) -> None:
    if not is_comparable(row):
        return
    want = simulated(row)
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    units = 4096 if row["optimizer"] == "muon" else 256
    if not is_rounded(row):
        assert_close(state, want, units=units, floor=0.1)
        return
    off = total = 0
    for a, b in zip(*map(jax.tree.leaves, (state, want)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        room = units * 2.0**-23 * max(0.1, np.abs(b).max(initial=0))
        off += int((np.abs(a - b) > room).sum())
        total += a.size
    assert off <= 0.03 * total


def assert_conserved(row: Row, state: Any) -> None:
    """The mean over the workers is that of a run that exchanges nothing.

    Of the momentum always, unless it is rounded to codes; of the parameters where
    their updates do not depend on them.
    """
    if row["ratio"] is None or row["payload"] in CODES or row["wrapped"] == "master":
        return
    alone = {
        "compress_ratio": None, "selection": "strided", "payload": None, "seed": None,
        "sync_every": 10**6, "rolling": False, "average_payload": None, "outer": None,
        "average_b2": None,
    }  # fmt: skip
    want = part(simulated(row, **alone)[1], "mu")
    narrow = "bfloat16" in (row["payload"], row["mu_dtype"])
    narrow = narrow or row["wrapped"] == "stochastic"
    assert_same_mean(part(state[1], "mu"), want, 2.0**-6 if narrow else 2.0**-17)


def assert_same_mean(got: Any, want: Any, room: float) -> None:
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        room_here = room * np.abs(b).max(initial=1e-3)
        np.testing.assert_allclose(a.mean(0), b.mean(0), rtol=0, atol=room_here)
