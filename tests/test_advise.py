"""The advisor: its arithmetic beside compiled programs, and its verdicts."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax import _collectives
from tests.workers import AXIS, random_tree, stack, stepper

N = 8
SHAPES = {
    "embed": (517, 48), "kernel": (96, 512), "conv": (3, 3, 32, 64), "odd": (101, 103),
    "little": (10, 20), "bias": (512,), "scale": (),
}  # fmt: skip
UPDATES = (0.010, 0.012)
NETWORK = slamb_jax.Network(N, 1e9)


def advise(params=340e6, network=NETWORK, **settings):
    settings = {"step_seconds": 0.5, "optimizer_seconds": UPDATES} | settings
    return slamb_jax.advise(params, network, **settings)


def report_of(tx):
    params = random_tree(SHAPES, 0)
    stacked = stack(params, N)
    state = stack(tx.init(params), N)
    step = stepper(tx, "shard_map_unchecked", N)
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        return slamb_jax.wire_report(step.lower(stacked, state, stacked))


def dense_lamb(dtype):
    def mean(grads, _):
        leaves, treedef = jax.tree.flatten(grads)
        leaves = _collectives.mean_over([x.astype(dtype) for x in leaves], AXIS)
        return treedef.unflatten([x.astype(jnp.float32) for x in leaves])

    return optax.chain(optax.stateless(mean), optax.lamb(0.01))


@pytest.mark.parametrize("name", ["lamb", "lamb_bfloat16"])
def test_dense_bytes_are_those_of_the_compiled_program(name):
    report = report_of(dense_lamb("float32" if name == "lamb" else "bfloat16"))
    cost = getattr(advise(random_tree(SHAPES, 0)), name)
    assert cost.bytes_per_step == pytest.approx(report.bytes_sent(), rel=0.01)


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("compress_ratio", [0.1, 0.3])
@pytest.mark.parametrize("min_size", [9000, 0])
def test_slamb_bytes_are_those_of_the_compiled_program(
    mu_dtype, compress_ratio, min_size
):
    settings = {"compress_ratio": compress_ratio, "min_size": min_size}
    settings["mu_dtype"] = mu_dtype
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, sync_every=10, **settings)
    report = report_of(tx)
    ask = functools.partial(advise, random_tree(SHAPES, 0), **settings)
    never, tenth = ask(sync_every=None).slamb, ask(sync_every=10).slamb
    assert never.bytes_per_step == pytest.approx(report.bytes_sent(), rel=0.01)
    average = 10 * (tenth.bytes_per_step - never.bytes_per_step)
    assert average == pytest.approx(report.bytes_sent(conditional=True), rel=0.01)
    seconds = NETWORK.report_seconds(report)
    assert never.exchange_seconds == pytest.approx(seconds, rel=0.01)
    seconds += NETWORK.report_seconds(report, conditional=True) / 10
    assert tenth.exchange_seconds == pytest.approx(seconds, rel=0.01)


def test_a_count_sends_k_and_an_hth():
    cost = advise(1e9).slamb
    assert cost.bytes_per_step == pytest.approx(2 * 7 / 8 * 4e9 * (0.1 + 0.01))
    shapes = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    exact, counted = advise(shapes).slamb, advise(1_000_000).slamb
    assert exact.bytes_per_step == pytest.approx(counted.bytes_per_step, rel=0.01)
