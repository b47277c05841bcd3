"""Published methods as chains: each equals its naive version, and is short."""

import ast
import collections
import inspect

import chex
import jax
import numpy as np
import optax
import pytest

import slamb_jax
from benchmarks import rivals
from benchmarks.rivals import chains, parts
from examples.common.traffic import report_of
from slamb_jax.exchange.codecs import Group
from tests import naive_published as naive
from tests.close import assert_close
from tests.naive import grid
from tests.optimizers import random_tree
from tests.programs import ROOT
from tests.test_codes import assert_drawn, draws
from tests.workers import AXIS, mesh_of, stack, stepper, train

N, STEPS, WARM = 4, 6, 3
SHAPES = {"b": (16,), "conv": (3, 3, 4, 8), "w": (70, 64)}
PARAMS = random_tree(SHAPES, 0)
GRADS = [random_tree(SHAPES, 1 + t, N) for t in range(STEPS)]
for _g in GRADS:  # a parameter that nothing depends on
    _g["b"] = _g["b"].at[:, 0].set(0.0)
pytestmark = pytest.mark.usefixtures("standard_promotion")

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
POWERSGD = rivals.powersgd(optax.sgd(0.1), AXIS, rank=3)
NUMBERS = {
    "b": None,
    "conv": slamb_jax.directions.DimensionNumbers((0, 1, 2), 3),
    "w": slamb_jax.directions.DimensionNumbers(),
}
DION2_ROWS = [  # of conv and w, at each step
    {
        name: np.asarray(jax.random.permutation(key, rows)[: round(rows / 4)])
        for key, name, rows in zip(
            jax.random.split(step, 2), ("conv", "w"), (36, 70), strict=True
        )
    }
    for step in (jax.random.fold_in(jax.random.key(0), t) for t in range(1, STEPS + 1))
]


def of_one_bit(make):
    """Of each step, in two phases."""
    warm, frozen = (make(0.02, AXIS, warm=warm) for warm in (True, False))
    return [warm] * WARM + [frozen] * (STEPS - WARM)


MATRICES = {"conv": (36, 8), "w": (70, 64)}
ONE_BIT = {"rate": 0.02, "warmup": WARM}
SPARSE = {"rate": 0.02, "every": 2, "share": 0.05}
DEMO = {"rate": lambda count: 0.02 / (1 + count), "chosen": 10}
CHUNKS = {"b": (1, 16), "conv": (9, 32), "w": (70, 64)}
DION2 = {"rate": 0.02, "momentum": 0.95, "rows": DION2_ROWS, "matrix": MATRICES}
LAMB, SGD = optax.lamb(0.02), optax.sgd(0.003)
CASES = {  # a method, its naive version, and the settings of that
    "1-bit Adam": (
        of_one_bit(rivals.one_bit_adam),
        naive.one_bit, ONE_BIT | {"eps": 1e-8, "scaled": False},
    ),
    "1-bit LAMB": (
        of_one_bit(rivals.one_bit_lamb),
        naive.one_bit, ONE_BIT | {"eps": 1e-6, "scaled": True},
    ),
    "signSGD": (rivals.signsgd(0.02, AXIS), naive.signsgd, {"rate": 0.02}),
    "Distributed Lion": (
        rivals.distributed_lion(0.02, AXIS, weight_decay=0.1),
        naive.distributed_lion, {"rate": 0.02, "decay": 0.1},
    ),
    "DGC": (
        rivals.dgc(0.02, AXIS, share=0.05), naive.dgc, {"rate": 0.02, "share": 0.05}
    ),
    "PowerSGD": (
        POWERSGD, naive.powersgd_sgd,
        {"rate": 0.1, "first_q": POWERSGD.init(PARAMS)[0].compressor.q},
    ),
    "SparseLoCo": (
        rivals.sparseloco(optax.sgd(0.02), AXIS, every=2, share=0.05),
        naive.sparseloco, SPARSE,
    ),
    "DeMo": (rivals.demo(axis=AXIS, **DEMO), naive.demo, DEMO | {"matrix": CHUNKS}),
    "Dion2": (
        rivals.dion2(lambda _: 0.02, AXIS, lambda _: NUMBERS), naive.dion2, DION2
    ),
    "dense LAMB": (rivals.dense(LAMB, AXIS), naive.dense, {"optimizer": LAMB}),
    "dense, bfloat16": (  # sums of four lose 2**-11 at most three times
        rivals.dense_bfloat16(SGD, AXIS),
        naive.dense, {"optimizer": SGD, "dtype": "bfloat16"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_naive_version(name):
    made, in_numpy, settings = CASES[name]
    n = 2 if in_numpy is naive.one_bit else N
    all_grads = [jax.tree.map(lambda g: g[:n], x) for x in GRADS]
    txs = made if isinstance(made, list) else [made] * STEPS
    got, state = stack((PARAMS, txs[0].init(PARAMS)), n)
    for tx, g in zip(txs, all_grads, strict=True):
        got, state = stepper(tx, "vmap", n)(g, state, got)
    params, grads = jax.tree.map(np.asarray, (PARAMS, all_grads))
    each = [[{k: g[k][i] for k in g} for i in range(n)] for g in grads]
    want = in_numpy(params, each, **settings)
    stacked = jax.tree.map(lambda *x: np.stack(x), *want)
    # Of steps of 0.02: roundings of float32, which a small root of v makes larger.
    chex.assert_trees_all_close(got, stacked, rtol=1e-4, atol=2e-5)


PAPER = slamb_jax.Exchange.paper(AXIS, sync_every=2)
OUTER = slamb_jax.Exchange(AXIS, payload=None, sync_every=3, outer=NESTEROV)
DILOCO = rivals.diloco(optax.sgd(0.1), AXIS, 3, NESTEROV)
OURS = [
    (rivals.slamb(0.02, PAPER), slamb_jax.slamb(0.02, PAPER), PARAMS),
    (DILOCO, slamb_jax.sgd(0.1, OUTER), PARAMS),
    # Of matrices: for the other leaves ours has v of the momentum.
    (rivals.muloco(0.02, AXIS, 3, NESTEROV), slamb_jax.muon(0.02, OUTER), ["w"]),
]


@pytest.mark.parametrize(("published", "ours", "names"), OURS)
def test_a_chain_of_ours_is_our_optimizer(published, ours, names):
    """Which other tests hold to NumPy, and to the authors' recorded runs."""
    params, *grads = ({name: x[name] for name in names} for x in (PARAMS, *GRADS))
    got, want = (train(tx, params, grads, "vmap")[-1][0] for tx in (published, ours))
    assert_close(got, want)


LARGE = {"b": (256,), "w": (512, 512)}
D = 512 * 512 + 256
MEANS, COPIES = "all-reduce", "all-to-all"


SENT = {  # by kind, the bytes that a worker puts in
    # To the owners, and back to all: copies.
    "1-bit Adam": {COPIES: D / 8 + N * D / 32},
    "signSGD": {COPIES: D / 8 + N * D / 32},
    "Distributed Lion": {COPIES: D / 8 + N * D / 32},
    "DGC": {COPIES: N * 0.05 * (8 * 512 * 512 + 6 * 256)},
    "PowerSGD": {MEANS: 4 * (3 * 1024 + 256)},
    "DeMo": {COPIES: N * 6 * 10 * (64 + 4)},
    "dense, bfloat16": {MEANS: 2 * D},
}


@pytest.mark.parametrize("name", SENT)
def test_it_sends_what_was_published(name):
    made, *_ = CASES[name]
    tx = made[-1] if isinstance(made, list) else made
    report = report_of(tx, slamb_jax.Exchange(AXIS), random_tree(LARGE, 0), mesh_of(N))
    found = collections.Counter()
    for x in report.collectives:
        found[x.kind] += x.payload_bytes * (x.times or 0)
    # A magnitude for each 1024, and what fills up the owners' slices.
    assert found == {k: pytest.approx(x, rel=0.05) for k, x in SENT[name].items()}


def test_codes_of_terngrad_are_the_grid_points_beside_and_right_on_average():
    codec, bits = parts.terngrad(), 8 / 5 + 32 / 640  # an element, its share of a scale
    x, count = draws(1280), 4000
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def sent(key):
        code = codec.encode(x, key, key)
        return code, codec.decode(code, like, key)

    code, y = jax.jit(jax.vmap(sent))(jax.random.split(jax.random.key(0), count))
    assert sum(a.nbytes for a in code) == count * x.size * bits / 8
    assert (y[:, x == 0] == 0).all()
    assert_drawn(x, np.asarray(y), grid("TernGrad", x, Group(1, 1, 1, 640)))


def test_each_is_a_dozen_lines_that_the_page_shows():
    page = (ROOT / "docs" / "guide" / "published_methods.md").read_text()
    for module in (chains, parts):
        for made in ast.parse(inspect.getsource(module)).body:
            if isinstance(made, ast.FunctionDef):
                assert inspect.getsource(getattr(module, made.name)) in page
                assert made.end_lineno - made.lineno <= 12 or module is parts
