"""The parts of the benchmark of JointSpar-LARS."""

import jax
import numpy as np
import optax
import pytest

import slamb_jax
from benchmarks.jointspar import methods, models, report, step, training
from examples.byte_lm.model import blocks
from tests.workers import mesh_of


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax's own code needs it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.long
def test_what_is_timed_is_training():
    """Dense and whole-budget steps agree; the frozen one moves what is not a layer."""
    model = models.resnet(2, 0, models.ResNet(channels=(4,), depth=2))
    dense = step.compiled(model, optax.lars(step.RATE))
    frozen = step.compiled(model, optax.lars(step.RATE), frozen=True)
    tx = slamb_jax.jointspar_lars(step.RATE, blocks, model.layers)
    whole = step.compiled(model, tx, sparse=True)
    assert frozen.flops < dense.flops
    for contestant in (dense, frozen, whole):
        contestant.take_turn(model.batch, count=True)
        assert len(contestant.times) == 1
    assert whole.active == [1.0]
    for name, start in model.params.items():
        same = jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            dense.state[0][name],
            whole.state[0][name],
        )
        assert same is not None
        kept = jax.tree.map(lambda a, b: (a == b).all(), frozen.state[0][name], start)
        assert all(jax.tree.leaves(kept)) == name.startswith("Block")


def test_rows_tell_what_was_possible():
    row = step.Row("m", "CPU", 2, 4, 0.5, 0.9, 1.0, 0.6, 0.3)
    assert row.possible_seconds == pytest.approx(0.2)
    assert row.realised == pytest.approx(0.5)


@pytest.mark.long
def test_a_run_counts_what_it_sent(tmp_path):
    """Of JointSpar what was drawn, to the byte; of LARS everything."""
    mesh, steps = mesh_of(2), 8
    runs = []
    for method in (methods.METHODS[0], methods.sparse(0.5)):
        trainer = training.Trainer("digits", method, mesh, steps)
        runs.append(trainer.run(0.1, seed=0))
        sizes = trainer.sizes
    lars, sparse = runs
    assert len(sizes) == 4
    assert lars.sent[-1] == steps * 4 * sum(sizes.values())  # 2 (n-1)/n = 1
    assert lars.active == 1
    always = 4 * sizes[None] * steps
    most = lars.sent[-1] + 4 * 3 * steps  # and a norm with each layer
    assert always < sparse.sent[-1] < most
    assert 0.2 < sparse.active < 0.8
    assert all(np.isfinite(lars.losses + sparse.losses))
    found = [[lars], [sparse]]
    assert report.training_table(found, "", "").row_count == 2
    report.training_picture(found, "nats", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
