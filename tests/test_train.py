"""The runner of trainings: searches that resume, bytes that are counted, tables."""

import dataclasses
import io
import math
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from benchmarks.train import __main__ as command
from benchmarks.train import page, search, tables
from benchmarks.train.grids import GRIDS, METHODS, WITH_METHODS, frontier, scale
from benchmarks.train.results import Results
from benchmarks.train.run import bytes_sent, execute, optimizer
from benchmarks.train.tasks import FOLDS, TASKS, parameters, task
from benchmarks.train.trials import SEEDS, Comparison, Method, Run, Setting, Trial
from slamb_jax.advisor.advice import RECORDED, Recorded
from tests import programs

RESULTS = programs.ROOT / "benchmarks" / "results"
SETTING = Setting("digits", 4, 4, 50)
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "r.jsonl")


def do_all(results, trial, loss):
    """Adds a result for every run that is missing, with the loss of it."""
    runs = []
    for run in search.all_missing([trial], results):
        runs.append(run)
        points = [{"step": 50, "loss": loss(run), "bytes": 300_000}]
        results.add({"key": run.key(), "points": points})
    return runs


SIZES = {name for name in TASKS if name[-1] in "km"}  # of byte_lm


@pytest.mark.parametrize("name", sorted(TASKS.keys() - SIZES))
def test_a_task_starts_from_guessing_and_repeats_its_batches(name):
    job = task(name)
    params = jax.jit(job.init)(jax.random.key(0))
    few = jax.tree.map(lambda x: x[:16], job.held_out)  # compiles sooner
    loss = float(jax.jit(job.loss)(params, few))
    guesses = 10 if "digits" in name else 2 if name == "autoencoder" else 256
    # Where the embedding is the output too, its scale is that of the width.
    off = 1.0 if name in ("prose", "wide") else 0.6
    assert loss == pytest.approx(math.log(guesses), abs=off)
    size = 20 if "digits_a" in name else 16
    once, twice, other = (list(job.batches(size, 2, seed)) for seed in (3, 3, 4))
    chex.assert_trees_all_equal(once, twice)
    chex.assert_tree_shape_prefix(once, (size,))
    pairs = zip(*map(jax.tree.leaves, (once[0], other[0])), strict=True)
    assert any((a != b).any() for a, b in pairs)
    assert job.accuracy is None or 0 <= float(job.accuracy(params)) <= 30


def test_a_seed_is_a_fold_and_rates_are_chosen_on_training_images():
    folds = [task("digits_folds").of_seed(i).held_out["images"] for i in range(6)]
    tested = {x.tobytes() for images in folds[:FOLDS] for x in images}
    assert sum(map(len, folds[:FOLDS])) == 1797
    assert len(tested) > 1700  # few images are there twice
    inner = {x.tobytes() for x in folds[FOLDS]}
    assert not inner & {x.tobytes() for x in folds[0]}


def test_no_two_grids_have_a_method_of_one_name():
    names = [name for module in WITH_METHODS for name in module.METHODS]
    assert sorted(names) == sorted(METHODS)


@pytest.mark.parametrize(
    ("best", "further"),  # at most six more; down to where it trains
    [(0, []), (2, [2, 3]), (9, [2, 3, 4, 5, 6, 7]), (-3, [-2, -3, -4])],
)
def test_a_search_widens_where_its_best_is_at_an_end(results, best, further):
    trial = Trial(SETTING, "LAMB")

    def power(run):
        return round(2 * math.log2(run.rate / METHODS["LAMB"].rate))

    def loss(run):  # above its best it diverges
        return best - power(run) if power(run) <= best else None

    runs = [(power(run), run.seed) for run in do_all(results, trial, loss)]
    searched = [(x, 0) for x in (-1, 0, 1, *further)]
    assert runs == searched + [(min(best, 7), seed) for seed in SEEDS[1:]]
    reread = Results(results.path)  # nothing is missing
    assert list(search.all_missing([trial], reread)) == []
    assert len(search.finished(trial, reread)) == len(SEEDS)


def test_wrong_arguments_are_named(tmp_path):
    lion = (f"{frontier.APART} Lion",)
    for told, options in {
        "no trial has any of nothing": {"only": ("nothing",)},
        r"--grid: \['nothing'\] are .*slamb_gap": {"grid": "nothing"},
        "--seeds: benchmarks/results has them": {"seeds": 1},
        "--seeds must be >= 1: 0": {"seeds": 0},
        "has no search of these runs": {"seeds": 1, "only": lion, "out": tmp_path},
    }.items():
        with pytest.raises(SystemExit, match=told):
            command.main(command.Config(**options))
    (tmp_path / "r.jsonl").write_text('{"key": {}}\nhalf a li')
    with pytest.raises(SystemExit, match=r"r.jsonl:2 is not a result"):
        Results(tmp_path / "r.jsonl")


@pytest.mark.parametrize(
    ("name", "by_steps"),
    [  # of the parameters in float32, exchanges by steps
        # The mean of all parameters follows the last step, where replicas differ.
        ("MuLoCo, H 30, outer 1 0", {29: 1, 30: 1, 60: 2}),
        # Of SLAMB a mean at steps 1 and 101, and 0.121 of the momentum at each.
        ("SLAMB, as published", {100: 14.1, 101: 14.2, 102: 15.3}),
        ("AdamW, bfloat16", {9: 4.5}),
        ("slamb, H 1", {9: 9 * 0.056}),
        # The warm-up is a fifth of 50 steps.
        ("1-bit LAMB", {9: 9, 12: 10 + 2 * 0.034}),
    ],
)
def test_the_bytes_of_all_steps_are_counted(name, by_steps):
    until = bytes_sent(SETTING, name)
    whole = 2 * 3 / 4 * 4 * parameters("digits")
    for steps, times in by_steps.items():
        assert until(steps) / whole == pytest.approx(times, rel=0.02), steps


def test_a_warm_up_is_another_optimizer_with_the_same_state():
    first, then = (lambda rate, _, x=x: optax.sgd(x) for x in (10.0, 1.0))
    tx = optimizer(Method(1.0, then, first=first, warmup=0.5), 1.0, steps=4)
    state, steps = tx.init(jnp.float32(0)), []
    for _ in range(3):
        u, state = jax.jit(tx.update)(jnp.float32(1), state)
        steps.append(float(u))
    assert steps == [-10, -10, -1]


def test_a_claim_is_tried_on_pairs():
    """Seeds that differ cancel; p is a half at the margin, and is small below it."""
    dense = [1.0, 3.0, 2.0, 5.0]
    noise = np.array([-0.001, 0.001, -0.002, 0.002])
    margin = math.log1p(tables.MARGIN)
    at = tables.paired(SETTING, list(dense * np.exp(noise + margin)), dense)
    half = 3.182446 * np.std(noise, ddof=1) / 2  # Student's t, three degrees of freedom
    assert (at.p, at.mean, at.half) == pytest.approx((0.5, margin, half))
    below = tables.paired(SETTING, list(dense * np.exp(noise)), dense)
    assert below.p < 0.005


def test_a_difference_that_grows_with_the_size_is_found(results):
    """Planted: 3 % at a million parameters, 2 points more for ten times as many."""
    (what, *_), noise = GRIDS["scale"].comparisons, (-0.001, 0.002, -0.001)
    for setting in scale.SIZES[:3]:
        more = math.log10(parameters(setting.task) / 1e6)
        for method, above in (
            ("AdamW", 0.1),
            ("AdamW, b1 0.8", 0.0),  # the better dense one
            ("adamw, H 1", 0.03 + 0.02 * more),
            ("adamw, b1 0.8, H 1", 0.2),
        ):
            losses = [math.exp(above + x) for x in noise]
            do_all(results, Trial(setting, method), lambda r, x=losses: x[r.seed])
    found = tables.differences(what, results)
    assert [parameters(x.setting.task) for x in found] == [23_008, 52_320, 120_576]
    assert found[0].half == pytest.approx(0, abs=1e-12)  # the noise is paired
    assert tables.slope(found) == pytest.approx((0.02, 0.0), abs=1e-9)


def test_runs_made_again_stand_beside_the_recorded_ones(results, tmp_path):
    trial = Trial(SETTING, "AdamW")
    do_all(results, trial, lambda run: 2.0 + 0.1 * run.seed)
    fresh = Results(tmp_path / "fresh.jsonl", tuned=results)
    two = dataclasses.replace(trial, seeds=(0, 1))
    do_all(fresh, two, lambda run: 1.01 * (2.0 + 0.1 * run.seed))
    shown = tables.beside_recorded([trial], fresh, results)
    column = {x.header: list(x.cells) for x in shown.columns}
    assert column["loss"] == ["2.071 ± 0.071"]
    assert column["recorded"] == ["2.050 ± 0.071"]
    assert column["off, %"] == ["+1.00"]


OURS = {  # the method, its seeds, and which comparison of scale has other sizes
    "ternary": ("adamw, b1 0.8, H 1", frontier.TESTED_ON, 0),
    "largest_of_7": ("adamw, largest of 7", SEEDS, 1),
    "largest_of_31": ("adamw, largest of 31", SEEDS, None),
    "largest_of_127": ("adamw, largest of 127", SEEDS, None),
}


@pytest.mark.parametrize("payload", RECORDED)
def test_what_the_advisor_says_of_losses_is_recorded(payload):
    method, seeds, of_sizes = OURS[payload]
    noisy = Comparison("", (method,), ("AdamW, b1 0.8",), (frontier.NOISY,), seeds)
    found = tables.differences(noisy, Results(RESULTS / "frontier.jsonl"))
    if of_sizes is not None:
        scaled = GRIDS["scale"].comparisons[of_sizes]
        found += tables.differences(scaled, Results(RESULTS / "scale.jsonl"))
    ends = [math.expm1(x.mean + y) * 100 for x in found for y in (-x.half, x.half)]
    sizes = [parameters(x.setting.task) for x in found]
    near = pytest.approx([min(ends), max(ends)], abs=0.06)
    assert RECORDED[payload] == Recorded(near, (min(sizes), max(sizes)))


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.jsonl")))
def test_the_recorded_page_is_that_of_the_recorded_data(name, tmp_path, monkeypatch):
    recorded = RESULTS / f"{name}.jsonl"
    shutil.copy(recorded, tmp_path)
    drawn = []
    monkeypatch.setattr(page, "by_bytes", lambda *args: drawn.append(args))
    results = Results(tmp_path / recorded.name)
    path = page.write_page(name, GRIDS[name], results, Console(file=io.StringIO()))
    assert path.read_text() == recorded.with_suffix(".md").read_text()
    assert len(drawn) == (name == "frontier")
    for run in results:
        assert {"loss", "accuracy"} & run["points"][-1].keys()
        assert run["key"].keys() == Run(SETTING, "", 0.0, 0).key().keys()


@pytest.mark.long
@pytest.mark.usefixtures("quick_to_compile")
def test_the_command_searches_and_draws_and_a_run_that_diverges_ends(tmp_path):
    diverged = execute(Run(SETTING, "AdamW", 1e30, 0), tmp_path)
    assert [point["loss"] for point in diverged["points"]] == [None]
    command.main(command.Config(grid="smoke", only=("AdamW",), out=tmp_path))
    results = Results(tmp_path / "smoke.jsonl")
    found = [*results]
    assert len(found) >= len(search.POWERS) + len(SEEDS) - 1
    first, *_, end = found[0]["points"]
    assert end["loss"] < first["loss"]
    assert end["accuracy"] > first["accuracy"]
    assert end["bytes"] == 50 * 1.5 * 4 * parameters("digits")
    page.by_bytes(tables.cells(GRIDS["smoke"].trials, results), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.long
def test_the_default_is_dense_where_data_differ_and_local_steps_are_not(tmp_path):
    def trained(name, task="digits_apart", steps=300):
        run = Run(Setting(task, 5, 16, steps), name, 3e-3, 0)
        points = execute(run, tmp_path)["points"]
        (at,) = (x.get("agreement") for x in points if x["step"] == 100)
        return points[-1]["loss"], points[-1]["accuracy"], at

    names = "optax.adamw", "adamw", "DiLoCo, H 30"
    dense, ours, local = map(trained, names)
    alike = trained("adamw", "digits_alike", 100)
    assert ours[0] < 3 * dense[0]
    assert ours[1] > dense[1] - 2
    assert local[0] > 10 * dense[0]  # a loss that this test would notice
    assert ours[2] < 0.7
    assert np.isfinite(alike[0])
    assert alike[2] > 0.7
