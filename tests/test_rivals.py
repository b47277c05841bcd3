"""Rivals: each equals its naive version, and sends the bytes that it declares."""

from functools import partial

import chex
import jax
import numpy as np
import optax
import pytest

import slamb_jax
from benchmarks import rivals
from benchmarks.rivals.exchange import matrix_shape
from tests import naive_rivals
from tests.optimizers import random_tree, step_on_gradients
from tests.workers import AXIS, mesh_of

N = 4
EXCHANGE = slamb_jax.Exchange(AXIS)
SHAPES = {"b": (16,), "conv": (3, 3, 4, 8), "w": (70, 64)}
MATRIX = {name: matrix_shape(shape) for name, shape in SHAPES.items()}
PARAMS = random_tree(SHAPES, 0)
GRADS = [random_tree(SHAPES, 1 + t, N) for t in range(6)]
for _g in GRADS:  # a parameter that nothing depends on
    _g["b"] = _g["b"].at[:, 0].set(0.0)
pytestmark = pytest.mark.usefixtures("standard_promotion")

POWERSGD = rivals.powersgd(optax.sgd(0.1), AXIS, rank=3)


def powersgd_sgd(params, grads):
    q = POWERSGD.optimizer.init(params)[0].q.values()
    first = {"first_q": dict(zip(["conv", "w"], q, strict=True))}
    return naive_rivals.powersgd_sgd(params, grads, rate=0.1, matrix=MATRIX, **first)


NUMBERS = {
    "b": None,
    "conv": slamb_jax.directions.DimensionNumbers((0, 1, 2), 3),
    "w": slamb_jax.directions.DimensionNumbers(),
}
DION2_ROWS = [  # of conv and w, at each step
    [
        np.asarray(jax.random.permutation(key, rows)[: round(rows / 4)])
        for key, rows in zip(jax.random.split(step, 2), (36, 70), strict=True)
    ]
    for step in (jax.random.fold_in(jax.random.key(0), t) for t in range(1, 7))
]
CASES = {  # a rival, and its naive version
    "LAMB": (
        rivals.dense(optax.lamb(0.02), AXIS),
        partial(naive_rivals.dense, optimizer=optax.lamb(0.02)),
    ),
    "dense, bfloat16": (  # sums of four lose 2**-11 at most three times
        rivals.dense_bfloat16(optax.sgd(0.003), AXIS, buckets=2),
        partial(naive_rivals.dense, optimizer=optax.sgd(0.003), dtype="bfloat16"),
    ),
    "PowerSGD": (POWERSGD, powersgd_sgd),
    "1-bit LAMB": (
        rivals.one_bit_lamb(0.02, AXIS, N, 3, weight_decay=0.1),
        partial(naive_rivals.one_bit_lamb, rate=0.02, warmup=3, decay=0.1),
    ),
    "SparseLoCo": (
        rivals.sparseloco(0.02, AXIS, sync_every=2, chosen=50),
        partial(
            naive_rivals.sparseloco,
            rate=0.02, every=2, chosen=50, decay=0.95, outer_rate=1.0,
        ),
    ),
    "Dion2": (
        rivals.dion2(lambda _: 0.02, AXIS, lambda _: NUMBERS),
        partial(
            naive_rivals.dion2, rate=0.02, momentum=0.95, rows=DION2_ROWS,
            matrix={"conv": (36, 8), "w": (70, 64)},
        ),
    ),
    "DeMo": (
        rivals.demo(0.02, AXIS, chosen=10),
        partial(naive_rivals.demo, rate=0.02, chosen=10, matrix=MATRIX),
    ),
}  # fmt: skip
# Steps that send together what the program can, where it is not one, and with what.
EVERY = {"1-bit LAMB": (3, 4), "SparseLoCo": (1, 2)}
KINDS = {
    "dense, bfloat16": {"all-reduce f16"},
    "1-bit LAMB": {
        "all-gather f32",
        "all-gather u8",
        "all-reduce f32",
        "all-to-all u8",
    },
    "SparseLoCo": {"all-gather f32", "all-gather u16"},
    "DeMo": {"all-gather f32", "all-gather u16"},
}


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_naive_version_and_sends_what_it_declares(name, simulated):
    rival, naive = CASES[name]
    tx, mesh = rival.optimizer, mesh_of(N)
    step, start = step_on_gradients(tx), (PARAMS, tx.init(PARAMS))
    if simulated:
        state = slamb_jax.simulated_replicas(start, N)
        run = slamb_jax.simulated_step(step, N, EXCHANGE)
    else:
        state = slamb_jax.replicate(start, mesh, EXCHANGE)
        run = slamb_jax.per_worker_step(step, mesh, EXCHANGE)
        report = slamb_jax.wire_report(run.lower(state, GRADS[0]))
        sends = [x for t in EVERY.get(name, (1,)) for x in rival.sends(PARAMS, N, t)]
        sent = report.bytes_sent() + report.bytes_sent(conditional=True)
        assert sent == pytest.approx(rivals.wire_bytes(sends, N), rel=1e-9)
        kinds = {f"{c.kind} {c.dtype}" for c in report.collectives}
        assert kinds == KINDS.get(name, {"all-reduce f32"})
    for g in GRADS:
        state, _ = run(state, g)
    params, grads = jax.tree.map(np.asarray, (PARAMS, GRADS))
    want = naive(params, [[{k: g[k][i] for k in g} for i in range(N)] for g in grads])
    stacked = jax.tree.map(lambda *x: np.stack(x), *want)
    chex.assert_trees_all_close(state[0], stacked, rtol=1e-4, atol=2e-5)


def test_what_is_sent_grows_as_published():
    def sent(name, workers=4, step=1):
        sends = CASES[name][0].sends(PARAMS, workers, step)
        return rivals.wire_bytes(sends, workers)

    assert sent("1-bit LAMB", step=4) == pytest.approx(sent("LAMB") / 32, rel=0.05)
    assert [sent("SparseLoCo", step=t) > 0 for t in (1, 2)] == [False, True]
    assert [CASES["SparseLoCo"][0].agreed(t) for t in (1, 2)] == [False, True]
    # All-gathers send in proportion to the other workers, all-reduces hardly more.
    assert sent("DeMo", 64) == 21 * sent("DeMo", 4)
    assert sent("PowerSGD", 64) < 1.4 * sent("PowerSGD", 4)
