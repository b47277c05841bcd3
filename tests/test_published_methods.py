"""Published methods as chains: each equals its naive version, and is short."""

import ast
import collections
import inspect
from functools import partial

import chex
import jax
import numpy as np
import optax
import pytest

import slamb_jax
from benchmarks import rivals
from benchmarks.rivals import chains, parts
from examples.common.traffic import report_of
from tests import naive_published as naive
from tests.optimizers import random_tree, step_on_gradients
from tests.programs import ROOT
from tests.replay import masks_at
from tests.test_codes import draws
from tests.workers import AXIS, mesh_of

N, STEPS, WARM = 4, 7, 3
EXCHANGE = slamb_jax.Exchange(AXIS)
SHAPES = {"b": (16,), "conv": (3, 3, 4, 8), "w": (70, 64)}
PARAMS = random_tree(SHAPES, 0)
GRADS = [random_tree(SHAPES, 1 + t, N) for t in range(STEPS)]
for _g in GRADS:  # a parameter that nothing depends on
    _g["b"] = _g["b"].at[:, 0].set(0.0)
pytestmark = pytest.mark.usefixtures("standard_promotion")

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
STRIDED = slamb_jax.selections.Strided(0.25, min_size=20)
PAPER = slamb_jax.Exchange.paper(AXIS, selection=STRIDED, sync_every=3)
MASKS = [masks_at(STRIDED, [*SHAPES.values()], t) for t in range(1, STEPS + 1)]
LOCAL = optax.adamw(0.02, weight_decay=0.0)
POWERSGD = rivals.powersgd(optax.sgd(0.1), AXIS, rank=3)
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
    for step in (jax.random.fold_in(jax.random.key(0), t) for t in range(1, STEPS + 1))
]


def of_one_bit(make):
    """By the steps of its two phases."""
    return [(WARM, make(0.02, AXIS, warm=True)), (STEPS, make(0.02, AXIS, warm=False))]


CASES = {  # a method, and its naive version
    "SLAMB": (
        rivals.slamb(0.02, PAPER),
        partial(naive.slamb, rate=0.02, masks=MASKS, every=3, b3=0.93),
    ),
    "1-bit Adam": (
        of_one_bit(rivals.one_bit_adam),
        partial(naive.one_bit, rate=0.02, warmup=WARM, eps=1e-8, scaled=False),
    ),
    "1-bit LAMB": (
        of_one_bit(rivals.one_bit_lamb),
        partial(naive.one_bit, rate=0.02, warmup=WARM, eps=1e-6, scaled=True),
    ),
    "signSGD": (rivals.signsgd(0.02, AXIS), partial(naive.signsgd, rate=0.02)),
    "Distributed Lion": (
        rivals.distributed_lion(0.02, AXIS, weight_decay=0.1),
        partial(naive.distributed_lion, rate=0.02, decay=0.1),
    ),
    "DGC": (
        rivals.dgc(0.02, AXIS, share=0.05),
        partial(naive.dgc, rate=0.02, share=0.05),
    ),
    "PowerSGD": (
        POWERSGD,
        lambda *given: naive.powersgd_sgd(
            *given, rate=0.1, first_q=POWERSGD.init(PARAMS)[0].compressor.q
        ),
    ),
    "DiLoCo": (
        rivals.diloco(LOCAL, AXIS, 3, NESTEROV),
        partial(
            naive.diloco,
            local=lambda: naive.Adam(0.02), every=3, rate=0.7, momentum=0.9,
        ),
    ),
    "MuLoCo": (
        rivals.muloco(0.02, AXIS, 3, NESTEROV),
        partial(
            naive.diloco,
            local=lambda: naive.Optax(optax.contrib.muon(0.02), PARAMS),
            every=3, rate=0.7, momentum=0.9,
        ),
    ),
    "SparseLoCo": (
        rivals.sparseloco(optax.sgd(0.02), AXIS, every=2, share=0.05),
        partial(naive.sparseloco, rate=0.02, every=2, share=0.05),
    ),
    "DeMo": (
        rivals.demo(lambda count: 0.02 / (1 + count), AXIS, chosen=10),
        partial(
            naive.demo, rate=lambda count: 0.02 / (1 + count), chosen=10,
            matrix={"b": (1, 16), "conv": (9, 32), "w": (70, 64)},
        ),
    ),
    "Dion2": (
        rivals.dion2(lambda _: 0.02, AXIS, lambda _: NUMBERS),
        partial(
            naive.dion2, rate=0.02, momentum=0.95, rows=DION2_ROWS,
            matrix={"conv": (36, 8), "w": (70, 64)},
        ),
    ),
    "dense LAMB": (
        rivals.dense(optax.lamb(0.02), AXIS),
        partial(naive.dense, optimizer=optax.lamb(0.02)),
    ),
    "dense, bfloat16": (  # sums of four lose 2**-11 at most three times
        rivals.dense_bfloat16(optax.sgd(0.003), AXIS, buckets=2),
        partial(naive.dense, optimizer=optax.sgd(0.003), dtype="bfloat16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_naive_version(name, simulated):
    made, in_numpy = CASES[name]
    phases = made if isinstance(made, list) else [(STEPS, made)]
    state, mesh = (PARAMS, phases[0][1].init(PARAMS)), mesh_of(N)
    if simulated:
        state = slamb_jax.simulated_replicas(state, N)
    else:
        state = slamb_jax.replicate(state, mesh, EXCHANGE)
    done = 0
    for until, tx in phases:
        step = step_on_gradients(tx)
        if simulated:
            run = slamb_jax.simulated_step(step, N, EXCHANGE)
        else:
            run = slamb_jax.per_worker_step(step, mesh, EXCHANGE)
        for g in GRADS[done:until]:
            state, _ = run(state, g)
        done = until
    params, grads = jax.tree.map(np.asarray, (PARAMS, GRADS))
    want = in_numpy(
        params, [[{k: g[k][i] for k in g} for i in range(N)] for g in grads]
    )
    stacked = jax.tree.map(lambda *x: np.stack(x), *want)
    # Of steps of 0.02: roundings of float32, which a small root of v makes larger.
    chex.assert_trees_all_close(state[0], stacked, rtol=1e-4, atol=2e-5)


LARGE = {"b": (256,), "w": (512, 512)}
D, WORDS = 512 * 512 + 256, 64 * 64 + 4  # in chunks of 4096, and one of 256
MEANS = "all-reduce", False


def payloads(tx, params, workers):
    """Bytes that a worker puts into collectives, by kind and whether in a branch."""
    report = report_of(tx, slamb_jax.Exchange(AXIS), params, mesh_of(workers))
    found = collections.Counter()
    for x in report.collectives:
        found[x.kind, x.conditional] += x.payload_bytes * (x.times or 0)
    return found


SENT = {  # by kind and whether in a branch, the bytes that a worker puts in
    "1-bit Adam": {("all-to-all", False): D / 8, ("all-gather", False): D / 32},
    "signSGD": {("all-to-all", False): D / 8, ("all-gather", False): D / 32},
    "Distributed Lion": {("all-to-all", False): D / 8, ("all-gather", False): D / 32},
    "DGC": {("all-gather", False): 0.05 * (8 * 512 * 512 + 6 * 256)},
    "PowerSGD": {MEANS: 4 * (3 * 1024 + 256)},
    "DiLoCo": {("all-reduce", True): 4 * D},
    "DeMo": {("all-gather", False): 6 * 10 * (64 + 4)},
    "dense, bfloat16": {MEANS: 2 * D},
}


@pytest.mark.parametrize("name", SENT)
def test_it_sends_what_was_published(name):
    made, _ = CASES[name]
    tx = made[-1][1] if isinstance(made, list) else made
    found = payloads(tx, random_tree(LARGE, 0), N)
    # A magnitude for each 1024, and what fills up the owners' slices.
    assert found == {k: pytest.approx(x, rel=0.05) for k, x in SENT[name].items()}


CODECS = {  # that draw, and the bits of an element with its share of a scale
    "TernGrad": (parts.terngrad(), 8 / 5 + 32 / 640),
    "natural": (parts.natural(), 8 + 32 / 256),
}


@pytest.mark.parametrize("name", CODECS)
def test_codes_that_are_drawn_are_the_grid_points_beside_and_right_on_average(name):
    codec, bits = CODECS[name]
    x, count = draws(1280), 4000
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def sent(key):
        code = codec.encode(x, key, key)
        return code, codec.decode(code, like, key)

    code, y = jax.jit(jax.vmap(sent))(jax.random.split(jax.random.key(0), count))
    assert sum(a.nbytes for a in code) == count * x.size * bits / 8
    y, step = np.asarray(y), naive.grid(name, x)
    assert (np.abs(y - x) <= 1.0001 * step).all()
    assert (y[:, x == 0] == 0).all()
    np.testing.assert_allclose(y / step, np.round(y / step), atol=1e-3)
    error, deviation = y.mean(0, dtype=np.float64) - x, y.std(0, dtype=np.float64)
    random = deviation > 0.1 * step  # else few fell to one side
    assert random.sum() > 200
    assert np.abs(error[random] / deviation[random] * count**0.5).max() < 4.5
    assert (np.abs(error) / step)[~random].max() < 0.02


def test_each_is_a_dozen_lines_that_the_page_shows():
    page = (ROOT / "docs" / "guide" / "published_methods.md").read_text()
    for module in (chains, parts):
        for made in ast.parse(inspect.getsource(module)).body:
            if isinstance(made, ast.FunctionDef):
                assert inspect.getsource(getattr(module, made.name)) in page
                assert made.end_lineno - made.lineno <= 12 or module is parts
