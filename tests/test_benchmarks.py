"""Benchmarks of a step, of choices and of different data; what their counters count."""

import math
import string
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import slamb_jax
from benchmarks import (
    choices,
    different_data,
    few_bits,
    finetune,
    race,
    slamb_accuracy,
    slamb_gap,
    step,
)
from benchmarks.chips.traffic import traffic
from benchmarks.fewer_bytes import __main__ as fewer_bytes
from benchmarks.fewer_bytes.codes import CODES
from benchmarks.fewer_bytes.step import Leaves, first_state, in_low_rank, step_of
from benchmarks.fewer_bytes.trials import TRIALS, Trial
from benchmarks.frontier.results import Results
from benchmarks.jointspar import step as sparse
from benchmarks.jointspar import training
from benchmarks.shapes import MODELS
from examples.byte_lm.model import ByteLM, blocks
from slamb_jax import jointspar
from slamb_jax.exchange.codecs import codec_of
from tests.close import assert_close
from tests.optimizers import random_tree, standard_promotion
from tests.workers import AXIS, mesh_of, train

SHAPES = {"w": (40, 300), "b": (300,)}
FUSION = string.Template("""HloModule m

%fused (a: f32[1000], b: f32[10]) -> $result {
  %a = f32[1000]{0} parameter(0)
  %b = f32[10]{0} parameter(1)
  %c = s32[] constant(0)
  $body
}

ENTRY %main (x: f32[1000], y: f32[10]) -> $result {
  %x = f32[1000]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  ROOT %f = $result{0:T(128)} fusion(%x, %y), kind=kLoop, calls=%fused
}
""")
PART = """%s = f32[10]{0} slice(%a), slice={[0:10]}
  ROOT %r = f32[10]{0} add(%s, %b)"""
IN_PLACE = "ROOT %r = f32[1000]{0} dynamic-update-slice(%a, %b, %c)"
ON_CHIP = "ROOT %r = f32[10]{0:T(128)S(1)} negate(%b)"
CALLING = """HloModule m

%negated (p: (f32[10])) -> (f32[10]) {
  %p = (f32[10]{0}) parameter(0)
  %x = f32[10]{0} get-tuple-element(%p), index=0
  %n = f32[10]{0} negate(%x)
  ROOT %t = (f32[10]{0}) tuple(%n)
}

%other (p: (f32[10])) -> (f32[10]) {
  ROOT %p = (f32[10]{0}) parameter(0)
}

ENTRY %main (c: pred[], x: f32[10]) -> (f32[10]) {
  %c = pred[] parameter(0)
  %x = f32[10]{0} parameter(1)
  %t = (f32[10]{0}) tuple(%x)
  ROOT %r = (f32[10]{0}) """
BRANCHES = "conditional(%c, %t, %t), branch_computations={%negated, %other}\n}\n"
LOOP = """while(%t), condition=%other, body=%negated, \
backend_config={"known_trip_count":{"n":"7"}}
}
"""


@pytest.mark.parametrize(
    ("text", "elements", "kernels", "conditionals"),
    [
        # Of 1000 elements ten are read; ten are read and written in place.
        (FUSION.substitute(result="f32[10]", body=PART), 30, 1, 0),
        (FUSION.substitute(result="f32[1000]", body=IN_PLACE), 20, 1, 0),
        # Ten are read; what is written stays in a TPU's fast memory.
        (FUSION.substitute(result="f32[10]", body=ON_CHIP), 10, 1, 0),
        (CALLING + BRANCHES, 0, 0, 1),  # the branch that moves least runs
        (CALLING + LOOP, 7 * 20, 7, 0),
    ],
)
def test_kernels_and_their_traffic_are_counted(text, elements, kernels, conditionals):
    assert traffic(text) == (4 * elements, kernels, conditionals)


def test_of_a_compiled_program_each_array_is_passed_once():
    shape = jax.ShapeDtypeStruct((4096,), jnp.float32)
    step = jax.jit(lambda x, y: (x * 2 + y, y - 1))
    found = traffic(str(step.lower(shape, shape).compile().as_text()))
    assert 4 * 4096 * 4 <= found.bytes <= 4 * 4096 * 5  # one kernel, or two


@pytest.mark.parametrize("name", step.optimizers(workers=1))
def test_a_turn_is_two_steps_of_the_optimizer(name):
    """Each turn begins with the same parameters."""
    make = step.optimizers(workers=1)[name]
    rng = np.random.default_rng(0)
    params, grads = race.draw(SHAPES, rng, 0.02), race.draw(SHAPES, rng, 1.0)
    with standard_promotion():  # optax.lamb needs it
        contestant = race.Contestant(make(), params, grads)
        want, state, update = params, make().init(params), jax.jit(make().update)
        for _ in range(2):
            updates, state = update(grads, state, want)
            want = optax.apply_updates(want, updates)
    for _ in range(2):
        found = contestant.take_turn(params, grads)
    assert len(contestant.times) == 2
    assert contestant.kernels > 0
    assert_close(found, want)


def test_shapes_are_those_of_the_models():
    sizes = {"bert-base": 108.9, "bert-base-scanned": 108.9}
    for name, millions in sizes.items():
        assert round(sum(map(math.prod, MODELS[name].values())) / 1e6, 1) == millions


@pytest.mark.parametrize("name", [choices.DENSE, *choices.CHOICES])
def test_every_choice_is_an_optimizer_and_a_file_name(name):
    out = choices.Config().out
    assert Path(out, name).parent == out
    method = choices.method_of(name, seed=0)
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16)}
    method.make(0.1, method.exchange).init(params)


@pytest.mark.parametrize("apart", [False, True])
def test_a_worker_has_two_classes_where_data_differ(apart):
    _, y = next(different_data.batches(apart, 0))
    for own in np.split(y, different_data.WORKERS):
        assert (len(set(own // 2)) == 1) is apart


@pytest.mark.long
def test_the_default_is_dense_where_data_differ_and_local_steps_are_not():
    def trained(name, apart=True):
        return different_data.train(different_data.METHODS[name][0], 3e-3, apart, 0)

    with standard_promotion():
        dense, ours, local = map(trained, ("optax.adamw", "adamw", "DiLoCo, H 30"))
        alike = trained("adamw", apart=False)
    assert ours[0] < 3 * dense[0]
    assert ours[1] > dense[1] - 0.01
    assert local[0] > 10 * dense[0]  # a loss that this test would notice
    assert ours[2] < 0.7
    assert np.isfinite(alike[0])
    assert alike[2] > 0.7


@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion")
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
@pytest.mark.usefixtures("standard_promotion")
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


@pytest.mark.parametrize(
    ("benchmark", "option"),
    [
        (choices, "only"),
        (different_data, "only"),
        (fewer_bytes, "only"),
        (few_bits, "only"),
        (finetune, "pairs"),
        (step, "only"),
        (slamb_accuracy, "only"),
        (slamb_gap, "only"),
    ],
)
def test_a_name_that_a_benchmark_does_not_know_is_told(benchmark, option):
    config = benchmark.Config(**{option: ("nothing",)})
    told = rf"--{option}: \['nothing'\] are .*\['\w"
    with pytest.raises(SystemExit, match=told):
        benchmark.main(config)


@pytest.mark.parametrize("benchmark", [fewer_bytes, slamb_gap])
def test_a_task_that_a_benchmark_does_not_know_is_told(benchmark):
    with pytest.raises(SystemExit, match=r"--task: \['nothing'\] are .*byte_lm_apart"):
        benchmark.main(benchmark.Config(task="nothing"))


@pytest.mark.parametrize("workers", [0, 3, -2])
def test_trials_tell_of_workers_that_they_cannot_simulate(workers):
    with pytest.raises(SystemExit, match=f"--workers: {workers} is no multiple"):
        fewer_bytes.main(fewer_bytes.Config(workers=workers))


@pytest.mark.usefixtures("standard_promotion")  # optax mixes types
@pytest.mark.parametrize("name", slamb_gap.CHAINS)
def test_chains_of_the_gap_take_a_step(name):
    tx = slamb_gap.CHAINS[name](0.1)
    params = {"w": jnp.ones((40, 50)), "b": jnp.ones(30)}

    def step(gradient):
        updates, _ = tx.update(gradient, tx.init(params), params)
        return optax.apply_updates(params, updates)

    gradients = jax.tree.map(lambda x: jnp.stack([x] * 4), params)
    found = jax.eval_shape(jax.vmap(step, axis_name=slamb_gap.AXIS), gradients)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, gradients)


def test_matrices_of_large_models_are_large():
    for millions, matrices in ((64, 64), (128, 32), (300, 75)):
        shapes = MODELS[f"squares-{millions}m"]
        kernels = [shape for shape in shapes.values() if len(shape) == 2]
        assert len(kernels) == matrices
        assert sum(map(math.prod, kernels)) == millions * 2**20


def test_codes_of_normal_numbers_keep_less_than_any_could():
    """No code of as many bits leaves less than Shannon's bound."""
    rows = {row[""]: row for row in fewer_bytes.energy_left()}
    for row in rows.values():
        assert float(row["the least, by Shannon"]) < float(row["left"]) < 1
    assert abs(float(rows["sign"]["left"]) - (1 - 2 / np.pi)) < 0.01


@pytest.mark.parametrize("size", [70, 3000, 70_000])
@pytest.mark.parametrize("payload", [name for name in CODES if name != "uniform4"])
def test_what_codes_stand_for_is_what_the_library_decodes(payload, size):
    x = jax.random.normal(jax.random.key(0), (1, size))
    codec = codec_of(payload)
    code = codec.encode_array(x, codec.group_of(size), jnp.uint32(0))
    want = codec.decode(*code).reshape(1, -1)[:, :size]
    assert_close(CODES[payload].stands_for(x), want)


def three_steps(trial, params, gradients):
    """The parameters as a vector, after three steps on (workers, elements)."""
    flat, _ = ravel_pytree(params)
    leaves = Leaves(params)
    step = jax.jit(step_of(trial, leaves))
    state = first_state(flat, len(gradients), trial, leaves)
    for t in (1, 2, 3):
        state = step(state, gradients, jnp.int32(t), jnp.float32(0.1))
    return state.params


@pytest.mark.usefixtures("standard_promotion")
def test_what_is_predicted_cancels_where_nothing_is_rounded():
    params = random_tree({"a": (40, 30), "b": (70,)}, 99)
    gradients = jax.random.normal(jax.random.key(1), (4, 1270))
    want = three_steps(Trial(None), params, gradients)
    assert_close(three_steps(Trial(None, predicted=0.8), params, gradients), want)


@pytest.mark.usefixtures("standard_promotion")
def test_a_product_of_full_rank_is_the_matrix():
    params = {"a": jnp.zeros((32, 5, 8)), "b": jnp.zeros(70)}
    leaves, trial = Leaves(params), Trial(None, rank=32)
    x = jax.random.normal(jax.random.key(1), (4, 32 * 40 + 70))
    bases = first_state(x[0], 4, trial, leaves).bases
    q, _, received, _ = in_low_rank(trial, leaves)(x, None, None, bases, None)
    bound = 40 * np.finfo(np.float32).eps * np.abs(x).max()  # two sums of 32 and 40
    np.testing.assert_allclose(q, x, rtol=0, atol=bound)
    np.testing.assert_allclose(received[0], x.mean(0), rtol=0, atol=bound)


@pytest.mark.usefixtures("standard_promotion")
def test_trials_are_steps_of_the_optimizer():
    """The vector's step is that of adamw in the same codes, where nothing differs."""
    shapes = {"a": (40, 30), "b": (70,)}
    trees = [random_tree(shapes, seed) for seed in range(8)]
    gradients = jax.tree.map(lambda *x: jnp.stack(x), *trees)
    params = random_tree(shapes, 99)
    exchange = slamb_jax.Exchange(AXIS)
    tx = slamb_jax.adamw(0.1, exchange, b1=0.8, b2=0.95, weight_decay=0.0)

    history = train(tx, params, [gradients] * 3, "vmap")
    want = jax.tree.map(lambda x: x[0], history[-1][0])
    _, tree_of = ravel_pytree(params)
    vectors = jnp.stack([ravel_pytree(tree)[0] for tree in trees])
    found = three_steps(TRIALS["ternary"], params, vectors)
    assert_close(tree_of(found), want)
