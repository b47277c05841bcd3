"""Rivals: each equals its naive version, and sends the bytes that it declares."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Case:
    """A rival, its naive version, and what is expected of its program."""

    rival: rivals.Rival
    naive: Callable[..., Any]
    every: tuple[int, ...] = (1,)  # steps that send together what the program can
    kinds: tuple[str, ...] = ("all-reduce f32",)


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
POWERSGD = rivals.powersgd(optax.sgd(0.1), AXIS, rank=3)
CASES = {
    "LAMB": Case(
        rivals.dense(optax.lamb(0.02), AXIS),
        lambda p, g: naive_rivals.dense(p, g, optimizer=optax.lamb(0.02)),
    ),
    "dense, bfloat16": Case(  # sums of four lose 2**-11 at most three times
        rivals.dense_bfloat16(optax.sgd(0.003), AXIS, buckets=2),
        lambda p, g: naive_rivals.dense_bfloat16(p, g, optimizer=optax.sgd(0.003)),
        kinds=("all-reduce f16",),
    ),
    "PowerSGD": Case(
        POWERSGD,
        lambda p, g: naive_rivals.powersgd_sgd(
            p, g, rate=0.1, matrix=MATRIX,
            first_q=dict(zip(
                ["conv", "w"], POWERSGD.optimizer.init(p)[0].q.values(), strict=True
            )),
        ),
    ),
    "1-bit LAMB": Case(
        rivals.one_bit_lamb(0.02, AXIS, N, 3, weight_decay=0.1),
        lambda p, g: naive_rivals.one_bit_lamb(p, g, rate=0.02, warmup=3, decay=0.1),
        every=(3, 4),
        kinds=("all-gather f32", "all-gather u8", "all-reduce f32", "all-to-all u8"),
    ),
    "SparseLoCo": Case(
        rivals.sparseloco(0.02, AXIS, sync_every=2, chosen=50),
        lambda p, g: naive_rivals.sparseloco(
            p, g, rate=0.02, every=2, chosen=50, decay=0.95, outer_rate=1.0
        ),
        every=(1, 2),
        kinds=("all-gather f32", "all-gather u16"),
    ),
    "Dion2": Case(
        rivals.dion2(lambda _: 0.02, AXIS, lambda _: NUMBERS),
        lambda p, g: naive_rivals.dion2(
            p, g, rate=0.02, momentum=0.95, matrix={"conv": (36, 8), "w": (70, 64)},
            rows=DION2_ROWS,
        ),
    ),
    "DeMo": Case(
        rivals.demo(0.02, AXIS, chosen=10),
        lambda p, g: naive_rivals.demo(p, g, rate=0.02, chosen=10, matrix=MATRIX),
        kinds=("all-gather f32", "all-gather u16"),
    ),
}  # fmt: skip


def programs(case: Case) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """On a mesh, then simulated: the state of all workers, and their step."""
    tx = case.rival.optimizer

    step = step_on_gradients(tx)
    start, mesh = (PARAMS, tx.init(PARAMS)), mesh_of(N)
    state = slamb_jax.replicate(start, mesh, EXCHANGE)
    yield state, slamb_jax.per_worker_step(step, mesh, EXCHANGE)
    state = slamb_jax.simulated_replicas(start, N)
    yield state, slamb_jax.simulated_step(step, N, EXCHANGE)


@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_naive_version_and_sends_what_it_declares(name: str) -> None:
    case = CASES[name]
    as_numpy = {k: np.asarray(x) for k, x in PARAMS.items()}
    grads = [
        [{k: np.asarray(x[i]) for k, x in g.items()} for i in range(N)] for g in GRADS
    ]
    want = case.naive(as_numpy, grads)
    for state, run in programs(case):
        report = slamb_jax.wire_report(run.lower(state, GRADS[0]))
        if report.collectives:  # workers that are simulated have none
            sends = [x for t in case.every for x in case.rival.sends(PARAMS, N, t)]
            sent = report.bytes_sent() + report.bytes_sent(conditional=True)
            assert sent == pytest.approx(rivals.wire_bytes(sends, N), rel=1e-9)
            kinds = {f"{c.kind} {c.dtype}" for c in report.collectives}
            assert kinds == set(case.kinds)
        for g in GRADS:
            state, _ = run(state, g)
        for i in range(N):
            for key in SHAPES:
                got = state[0][key][i]
                np.testing.assert_allclose(got, want[i][key], rtol=1e-4, atol=2e-5)


def test_what_is_sent_grows_as_published() -> None:
    def sent(rival: rivals.Rival, workers: int = 4, step: int = 1) -> float:
        return rivals.wire_bytes(rival.sends(PARAMS, workers, step), workers)

    dense = sent(CASES["LAMB"].rival)
    one_bit, local = CASES["1-bit LAMB"].rival, CASES["SparseLoCo"].rival
    assert sent(one_bit, step=4) == pytest.approx(dense / 32, rel=0.05)
    assert [sent(local, step=t) > 0 for t in (1, 2)] == [False, True]
    assert [local.agreed(t) for t in (1, 2)] == [False, True]
    # All-gathers send in proportion to the other workers, all-reduces hardly more.
    demo = CASES["DeMo"].rival
    assert sent(demo, 64) == 21 * sent(demo, 4)
    assert sent(POWERSGD, 64) < 1.4 * sent(POWERSGD, 4)
