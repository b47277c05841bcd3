"""Benchmarks of a step and of JointSpar; what their counters count."""

import jax
import numpy as np
import optax
import pytest

from benchmarks import race, step
from benchmarks.chips.traffic import traffic
from benchmarks.jointspar import step as sparse
from benchmarks.jointspar import training
from benchmarks.train.results import Results
from examples.byte_lm.model import ByteLM, blocks
from slamb_jax import jointspar
from tests.close import assert_close
from tests.compiled import hlo
from tests.optimizers import descend, standard_promotion
from tests.workers import mesh_of, stack

SHAPES = {"w": (40, 300), "b": (300,)}


@pytest.mark.parametrize(
    ("name", "elements", "kernels", "conditionals"),
    [
        ("slice", 30, 1, 0),  # of 1000 elements ten are read
        ("in_place", 20, 1, 0),  # ten of them are read and written
        ("on_chip", 10, 1, 0),  # what is written stays in a TPU's fast memory
        ("branches", 0, 0, 1),  # the branch that moves least runs
        ("loop", 7 * 20, 7, 0),
    ],
)
def test_kernels_and_their_traffic_are_counted(name, elements, kernels, conditionals):
    assert traffic(hlo(name)) == (4 * elements, kernels, conditionals)


@pytest.mark.parametrize("name", step.optimizers(workers=1))
def test_a_turn_is_two_steps_of_the_optimizer(name):
    """Each turn begins with the same parameters."""
    make = step.optimizers(workers=1)[name]
    rng = np.random.default_rng(0)
    params, grads = race.draw(SHAPES, rng, 0.02), race.draw(SHAPES, rng, 1.0)
    want = descend(make(), lambda p, own, t: own, params, stack(grads, 1), steps=2)
    with standard_promotion():  # optax.lamb needs it
        contestant = race.Contestant(make(), params, grads)
    for _ in range(2):
        found = contestant.take_turn(params, grads)
    assert len(contestant.times) == 2
    assert contestant.kernels > 0
    assert_close(stack(found, 1), want)


@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion", "quick_to_compile")
def test_what_is_timed_is_training():
    """Dense and full-budget steps agree; the frozen one moves what is not a layer."""
    model = sparse.transformer(2, 0, ByteLM(2, 16, 2, 8))
    dense = sparse.compiled(model, optax.lars(sparse.RATE))
    frozen = sparse.compiled(model, optax.lars(sparse.RATE), frozen=True)
    tx = jointspar.jointspar(optax.lars(sparse.RATE), sparse.ONE, blocks, model.layers)
    full = sparse.compiled(model, tx)
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
@pytest.mark.usefixtures("standard_promotion", "quick_to_compile")
def test_a_run_counts_what_it_sent(tmp_path, monkeypatch):
    """Of JointSpar what was drawn; of LARS everything; and is not repeated."""
    steps, job, lines = 8, training.JOBS["digits"], []
    chosen = training.methods("digits", steps)[:3:2]
    monkeypatch.setattr(training, "methods", lambda *_: chosen)
    monkeypatch.setattr(training, "POWERS", (-3,))
    args = "digits", mesh_of(2), steps, (0,)
    results = Results(tmp_path / "training.jsonl")
    found = training.train_all(*args, results, lines.append)
    (lars,), (ours,) = found
    sizes = training.layer_sizes(job)
    assert len(sizes) == 4
    assert lars["sent"] == steps * 4 * sum(sizes.values())  # 2 (n-1)/n = 1
    assert lars["active"] == 1
    most = lars["sent"] + 4 * 3 * steps  # and a norm with each layer
    assert 4 * sizes[None] * steps < ours["sent"] < most
    assert 0.2 < ours["active"] < 0.8
    assert np.isfinite([lars["loss"], ours["loss"]]).all()
    assert training.cells([ours], [lars])["method"] == "JointSpar-LARS, 0.5 D"
    again = training.train_all(*args, Results(results.path), lines.append)
    assert (again, len(lines)) == (found, 2)


def test_a_name_that_a_benchmark_does_not_know_is_told():
    told = r"--only: \['nothing'\] are .*\['\w"
    with pytest.raises(SystemExit, match=told):
        step.main(step.Config(only=("nothing",)))
