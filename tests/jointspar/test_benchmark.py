"""The parts of the benchmark of JointSpar-LARS."""

import jax
import numpy as np
import optax
import pytest

from benchmarks.frontier.results import Results
from benchmarks.jointspar import models, step, training
from examples.byte_lm.model import blocks
from slamb_jax import jointspar
from tests.close import assert_close
from tests.workers import mesh_of

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.long
def test_what_is_timed_is_training():
    """Dense and full-budget steps agree; the frozen one moves what is not a layer."""
    model = models.resnet(2, 0, models.ResNet(channels=(4,), depth=2))
    dense = step.compiled(model, optax.lars(step.RATE))
    frozen = step.compiled(model, optax.lars(step.RATE), frozen=True)
    tx = jointspar.jointspar(optax.lars(step.RATE), step.ONE, blocks, model.layers)
    full = step.compiled(model, tx)
    assert frozen.flops < dense.flops
    for contestant in (dense, frozen, full):
        contestant.take_turn(model.batch)
        assert len(contestant.times) == 1
    assert full.active == [1.0]
    assert_close(full.state[0], dense.state[0], units=1000)
    for name, start in model.params.items():
        kept = jax.tree.map(lambda a, b: (a == b).all(), frozen.state[0][name], start)
        assert all(jax.tree.leaves(kept)) == name.startswith("Block")


@pytest.mark.long
def test_a_run_counts_what_it_sent(tmp_path, monkeypatch):
    """Of JointSpar what was drawn; of LARS everything; and is not repeated."""
    steps, job, lines = 8, training.JOBS["digits"], []
    chosen = training.methods("digits", steps)[:3:2]
    monkeypatch.setattr(training, "methods", lambda *_: chosen)
    monkeypatch.setattr(training, "POWERS", (-3,))
    args = "digits", mesh_of(2), steps, (0,)
    results = Results(tmp_path / "training.jsonl")
    found = training.train_all(*args, results, lines.append)
    (lars,), (sparse,) = found
    sizes = training.layer_sizes(job)
    assert len(sizes) == 4
    assert lars["sent"][-1] == steps * 4 * sum(sizes.values())  # 2 (n-1)/n = 1
    assert lars["active"] == 1
    most = lars["sent"][-1] + 4 * 3 * steps  # and a norm with each layer
    assert 4 * sizes[None] * steps < sparse["sent"][-1] < most
    assert 0.2 < sparse["active"] < 0.8
    assert np.isfinite(lars["losses"] + sparse["losses"]).all()
    assert training.training_table(found, "", "").row_count == 2
    again = training.train_all(*args, Results(results.path), lines.append)
    assert (again, len(lines)) == (found, 2)
