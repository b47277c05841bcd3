"""Each rival against a naive version, on a mesh, and its bytes against the HLO."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from benchmarks import rivals
from benchmarks.rivals.exchange import matrix_shape
from benchmarks.rivals.sparseloco import compress
from tests import naive_rivals
from tests.workers import AXIS, mesh_of, random_tree

N = 4
SHAPES = {"b": (16,), "conv": (3, 3, 4, 8), "w": (70, 64)}
MATRIX = {name: matrix_shape(shape) for name, shape in SHAPES.items()}
PARAMS = random_tree(SHAPES, 0)
GRADS = [random_tree(SHAPES, 1 + t, N) for t in range(6)]
for _g in GRADS:  # a parameter that nothing depends on
    _g["b"] = _g["b"].at[:, 0].set(0.0)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):  # optax's lamb and adamw need it
        yield


def exact(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """``optimizer`` on mean gradients."""

    def run(params: Any, grads: list) -> list:
        state = optimizer.init(params)
        for gs in grads:
            g = jax.tree.map(lambda *x: jnp.mean(jnp.stack(x), 0), *gs)
            updates, state = optimizer.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return [params] * N

    return run


def narrow(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    def run(params: Any, grads: list) -> list:
        def rounded(x: Any) -> Any:
            wide = jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
            return jnp.mean(wide, 0).astype(jnp.bfloat16).astype(jnp.float32)

        stacked = [jax.tree.map(lambda *x: np.stack(x), *gs) for gs in grads]
        return exact(optimizer)(params, [[jax.tree.map(rounded, g)] for g in stacked])

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """A rival: how to make it, its naive version, its collectives at step t."""

    make: Callable[[], optax.GradientTransformation]
    naive: Callable[..., Any]
    sends: Callable[[int], rivals.Sends]
    every: tuple[int, ...] = (1,)  # steps that send together what the program can
    kinds: tuple[tuple[str, str], ...] = (("all-reduce", "f32"),)
    tolerance: float = 2e-5


CASES = {
    "lamb": Case(
        lambda: rivals.averaged(optax.lamb(0.02), AXIS),
        exact(optax.lamb(0.02)),
        lambda t: rivals.averaged_sends(PARAMS, N, t),
    ),
    "lamb, bf16": Case(
        lambda: rivals.averaged(optax.lamb(0.02), AXIS, jnp.bfloat16),
        narrow(optax.lamb(0.02)),
        lambda t: rivals.averaged_sends(PARAMS, N, t, jnp.bfloat16),
        kinds=(("all-to-all", "u16"), ("all-gather", "u16")),
        tolerance=1e-3,  # a last bit of a 16-bit mean may fall either way
    ),
    "top-k": Case(
        lambda: optax.chain(
            rivals.topk_with_error_feedback(0.05, AXIS), optax.sgd(0.1)
        ),
        lambda p, g: naive_rivals.topk_sgd(p, g, ratio=0.05, rate=0.1),
        lambda t: rivals.topk_sends(PARAMS, N, t, 0.05),
        kinds=(("all-gather", "f32"), ("all-gather", "s32")),
    ),
    "PowerSGD": Case(
        lambda: optax.chain(rivals.powersgd(3, AXIS), optax.sgd(0.1)),
        lambda p, g: naive_rivals.powersgd_sgd(
            p, g, rate=0.1, matrix=MATRIX,
            first_q=dict(zip(["conv", "w"], rivals.powersgd(3, AXIS).init(p).q,
                             strict=True)),
        ),
        lambda t: rivals.powersgd_sends(PARAMS, N, t, 3),
    ),
    "1-bit LAMB": Case(
        lambda: rivals.one_bit_lamb(0.02, AXIS, N, 3, weight_decay=0.1),
        lambda p, g: naive_rivals.one_bit_lamb(p, g, rate=0.02, warmup=3, decay=0.1),
        lambda t: rivals.one_bit_lamb_sends(PARAMS, N, t, 3),
        every=(3, 4),
        kinds=(("all-to-all", "u8"), ("all-gather", "u8"), ("all-gather", "f32"),
               ("all-reduce", "f32")),
    ),
    "DiLoCo": Case(
        lambda: rivals.diloco(0.02, AXIS, 2),
        lambda p, g: naive_rivals.diloco(
            p, g, rate=0.02, every=2, outer_rate=0.7, momentum=0.9
        ),
        lambda t: rivals.diloco_sends(PARAMS, N, t, 2),
        every=(1, 2),
    ),
    "SparseLoCo": Case(
        lambda: rivals.sparseloco(0.02, AXIS, 2, chosen=50),
        lambda p, g: naive_rivals.sparseloco(
            p, g, rate=0.02, every=2, chosen=50, decay=0.95, outer_rate=1.0
        ),
        lambda t: rivals.sparseloco_sends(PARAMS, N, t, 2, 50),
        every=(1, 2),
        kinds=(("all-gather", "u16"), ("all-gather", "f32")),
    ),
    "DeMo": Case(
        lambda: rivals.demo(0.02, AXIS, 10),
        lambda p, g: naive_rivals.demo(p, g, rate=0.02, chosen=10, matrix=MATRIX),
        lambda t: rivals.demo_sends(PARAMS, N, t, 10),
        kinds=(("all-gather", "u16"), ("all-gather", "f32")),
    ),
}  # fmt: skip


def trainer(tx):
    def step(state, batch):
        params, opt_state = state
        grads = jax.tree.map(lambda g: g[0], batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), jnp.float32(0)

    return step


@pytest.mark.parametrize("name", CASES)
def test_simulated_it_is_its_naive_version(name):
    case = CASES[name]
    tx = case.make()
    state = slamb_jax.simulated_replicas((PARAMS, tx.init(PARAMS)), N)
    run = slamb_jax.simulated_step(trainer(tx), N, AXIS)
    for g in GRADS:
        state, _ = run(state, g)
    grads = [
        [{k: np.asarray(x[i]) for k, x in g.items()} for i in range(N)] for g in GRADS
    ]
    want = case.naive({k: np.asarray(x) for k, x in PARAMS.items()}, grads)
    for i in range(N):
        for key in SHAPES:
            np.testing.assert_allclose(
                state[0][key][i],
                want[i][key],
                rtol=1e-4,
                atol=case.tolerance,
                err_msg=key,
            )


@pytest.mark.parametrize("name", CASES)
def test_on_a_mesh_it_does_the_same_and_sends_what_it_says(name):
    case = CASES[name]
    tx = case.make()
    mesh = mesh_of(N)
    start = (PARAMS, tx.init(PARAMS))
    state = slamb_jax.replicate(start, mesh, AXIS)
    run = slamb_jax.per_worker_step(trainer(tx), mesh, AXIS)
    report = slamb_jax.wire_report(run.lower(state, GRADS[0]))
    sends = [send for t in case.every for send in case.sends(t)]
    sent = report.bytes_sent() + report.bytes_sent(conditional=True)
    assert sent == pytest.approx(rivals.wire_bytes(sends, N), rel=1e-9)
    assert {(c.kind, c.dtype) for c in report.collectives} == set(case.kinds)
    assert {kind for kind, _ in sends} == {kind for kind, _ in case.kinds}
    for g in GRADS:
        state, _ = run(state, g)
    simulated = slamb_jax.simulated_replicas(start, N)
    run = slamb_jax.simulated_step(trainer(tx), N, AXIS)
    for g in GRADS:
        simulated, _ = run(simulated, g)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=case.tolerance),
        state[0],
        simulated[0],
    )


def test_how_what_is_sent_grows():
    def sent(name, workers, step=1):
        sends = {
            "dense": lambda: rivals.averaged_sends(PARAMS, workers, step),
            "one bit": lambda: rivals.one_bit_lamb_sends(PARAMS, workers, step, 4),
            "diloco": lambda: rivals.diloco_sends(PARAMS, workers, step, 3),
            "demo": lambda: rivals.demo_sends(PARAMS, workers, step),
            "powersgd": lambda: rivals.powersgd_sends(PARAMS, workers, step, 2),
        }
        return rivals.wire_bytes(sends[name](), workers)

    dense = sent("dense", 4)
    assert dense == 2 * 3 / 4 * 4 * sum(x.size for x in PARAMS.values())
    assert sent("one bit", 4, step=4) == dense
    assert sent("one bit", 4, step=5) == pytest.approx(dense / 32, rel=0.05)
    assert [sent("diloco", 4, step=t) for t in (2, 3)] == [0, dense]
    # What an all-gather sends grows with the workers, what an all-reduce hardly.
    assert sent("demo", 64) == 21 * sent("demo", 4)
    assert sent("powersgd", 64) < 1.4 * sent("powersgd", 4)


def test_two_bits_are_two_bits():
    x = jnp.asarray(np.random.default_rng(0).normal(size=5000), jnp.float32)
    words, scales = compress(x, 64)
    assert words.dtype == jnp.uint16
    assert words.shape == (2, 64)
    assert scales.shape == (2, 2)
    assert int(words.max()) < 1 << 14
