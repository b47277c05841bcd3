"""Simulated runs, the main job, and its text."""

import json
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.train.tasks import task
from examples.byte_lm import data
from examples.byte_lm.model import ByteLM
from examples.common import simulated
from examples.common.optimizers import dense
from tests import programs
from tests.optimizers import standard_promotion

pytestmark = pytest.mark.usefixtures("standard_promotion")


def program_of(workers=4):
    """On 16 examples a step, of all workers together."""
    method = simulated.Method("SGD", lambda rate, _: dense(optax.sgd(rate), "data"))
    sizes = {"workers": workers, "batch": 16 // workers, "steps": 8}
    return simulated.Program(task("digits"), method, **sizes)


@pytest.fixture(scope="module")
def whole():
    """A program and its run of eight steps."""
    with standard_promotion():
        program = program_of()
        return program, simulated.train(program, 0.1, due=[3, 8])


def test_dense_runs_are_those_of_one_worker_with_all_of_the_batch(whole):
    _, many = whole
    one = simulated.train(program_of(workers=1), 0.1, due=[3, 8])
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-5)
    assert many.steps == [3, 8]
    assert many.losses[1] < many.losses[0]
    assert 0 < many.seconds[0] < many.seconds[1]


def test_a_run_that_diverges_has_nan_from_there_on(whole):
    found = simulated.train(whole[0], 1e38, due=[3, 8], sent=lambda t: 5.0 * t)
    assert all(map(math.isnan, found.losses))
    assert found.sent == [15.0, 40.0]
    assert len(found.steps) == len(found.losses) == len(found.seconds) == 2


def test_a_run_that_is_stopped_goes_on(whole, tmp_path, monkeypatch):
    program, kept = whole[0], {"due": [3, 8], "resume": tmp_path / "kept"}

    def stops_after(step):
        with pytest.raises(simulated.UnfinishedError, match=f"step {step} of 8"):
            simulated.train(program, 0.1, **kept, until=0.0)

    stops_after(1)
    monkeypatch.setattr(simulated, "SAVED_EVERY", 0.0)
    killed = mock.patch.object(program, "evaluate", side_effect=KeyboardInterrupt)
    with killed, pytest.raises(KeyboardInterrupt):  # after step 3
        simulated.train(program, 0.1, **kept)
    stops_after(3)
    found = simulated.train(program, 0.1, **kept)
    assert found.losses == whole[1].losses
    assert 0 < found.seconds[0] < found.seconds[1]


def test_recorded_runs_begin_with_the_parameters_that_they_began_with():
    """Flax draws them by the number of each layer, in the order of the code."""
    init, tokens = ByteLM(1, 16, 2, 8).init, jnp.zeros((1, 8), jnp.int32)
    params = jax.eval_shape(init, jax.random.key(0), tokens)
    block = params["params"]["Block_0"]
    shapes = {name: block[name]["kernel"].shape for name in ("Dense_0", "Dense_1")}
    assert shapes == {"Dense_0": (64, 16), "Dense_1": (16, 64)}


@pytest.mark.long
def test_main_job(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 90)
    tiny = "--steps=2 --evaluations=2 --batch=1 --context=16 --layers=1 --width=16"
    tiny += " --heads=2 --eval-batch=8 --optimizer dense_adamw adamw slamb"
    folders = "--files", tmp_path / "text", "--out", tmp_path / "out"
    # Two steps of each: it compiles.
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    programs.ended("-m", "examples.byte_lm.main", *tiny.split(), *folders, **quick)
    runs = json.loads((tmp_path / "out" / "results.json").read_text())
    for r in runs:
        assert r["steps"] == [1, 2]
        assert np.isfinite(r["losses"]).all()
    dense, few, published = (r["sent"][-1] for r in runs)
    assert few < 0.1 * dense < published < dense
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


def test_no_file_is_in_both_parts(tmp_path):
    files = [tmp_path / f"{i:02}.txt" for i in range(60)]
    for i, path in enumerate(files):
        path.write_bytes(bytes([i]) * 100)
    train, held_out = data.load(files, 10)
    assert (len(train), len(held_out)) == (5700, 300)
    assert not set(train) & set(held_out)
