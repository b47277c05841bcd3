"""Frontier: sweeps that resume, bytes that are counted, a report from the data."""

import functools
import io
import json
import math
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

pytest.importorskip("sklearn")

from benchmarks.frontier import __main__ as command
from benchmarks.frontier import anew, fineweb, grid, page, report, scale, sweep
from benchmarks.frontier.claims import losses_on_seeds, paired
from benchmarks.frontier.grid import CORE, SEEDS, Setting
from benchmarks.frontier.methods import DENSE, METHODS, make
from benchmarks.frontier.results import Results, lowest, rate_of
from benchmarks.frontier.run import Run, execute
from benchmarks.frontier.tasks import TASKS, task
from benchmarks.frontier.wire import Made, sends_of
from benchmarks.rivals import elements
from slamb_jax.advisor.advice import RECORDED, Recorded
from tests import programs

RESULTS = programs.ROOT / "benchmarks" / "results"
SETTING = Setting("digits", 4, 4, 50)
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "r.jsonl")


def do_all(results, method, loss, setting=SETTING):
    """Adds a result for every run that is missing; the loss is a number or of a run."""
    known = {"step_seconds": 0.1, "run_seconds": 0.0, "hardware": "none"}
    runs = []
    for run in sweep.missing(setting, method, results):
        runs.append(run)
        value = loss(run) if callable(loss) else loss
        point = {"step": 50, "loss": value, "exchanges": [["all-reduce", 4000, 50]]}
        results.add({"key": run.key(), "points": [point], **known})
    return runs


SIZES = {x for x in TASKS if x[-1] in "km" and x != "byte_lm_23k"}  # of one task


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"fineweb"} - SIZES))
def test_a_task_starts_from_guessing_and_repeats_its_batches(name):
    job = task(name)
    params = jax.jit(job.init)(jax.random.key(0))
    loss = float(jax.jit(job.loss)(params, job.held_out))
    guesses = {"digits": 10, "autoencoder": 2}.get(name, 256)
    # Where the embedding is the output too, its scale is that of the width.
    off = 1.0 if name in ("prose", "wide") else 0.6
    assert loss == pytest.approx(math.log(guesses), abs=off)
    once, twice, other = (list(job.batches(16, 2, seed)) for seed in (3, 3, 4))
    chex.assert_trees_all_equal(once, twice)
    chex.assert_tree_shape_prefix(once, (16,))
    pairs = zip(*map(jax.tree.leaves, (once[0], other[0])), strict=True)
    assert any((a != b).any() for a, b in pairs)


def tokens_in(path, tokens, said=None):
    head = np.zeros(fineweb.HEADER, np.int32)
    head[:3] = fineweb.MAGIC, 1, len(tokens) if said is None else said
    path.write_bytes(head.tobytes() + tokens.astype(np.uint16).tobytes())


def test_fineweb_is_read_in_the_order_of_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(fineweb, "FILES", tmp_path)
    with pytest.raises(SystemExit, match=r"no fineweb_train_\*\.bin"):
        fineweb.fineweb()
    first = tmp_path / "fineweb_train_000001.bin"
    tokens_in(first, np.arange(35))
    tokens_in(tmp_path / "fineweb_train_000002.bin", np.arange(100, 118))
    tokens_in(tmp_path / "fineweb_val_000000.bin", np.arange(90))
    small = {"layers": 1, "width": 32, "heads": 2, "context": 4, "vocabulary": 128}
    job = fineweb.fineweb(**small, validated=16)
    chex.assert_shape(job.held_out, (16, 5))
    read = list(job.batches(4, 3, 0))
    rows = [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]  # of a row the first token was predicted
    np.testing.assert_array_equal(read[0][:2], rows)
    assert [x[0, 0] for x in read] == [0, 16, 100]  # the end of a file is left
    params = job.init(jax.random.key(0))
    loss, grads = jax.jit(jax.value_and_grad(job.loss))(params, read[0])
    assert float(loss) == pytest.approx(math.log(128))  # its head begins at zero
    each = jax.jit(jax.vmap(jax.grad(job.loss), (None, 0)))(params, read[0][:, None])
    mean = jax.tree.map(lambda x: x.mean(0), each)
    for got, want in zip(*map(jax.tree.leaves, (grads, mean)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-2 * float(jnp.abs(want).max()))
    broken = {
        "2 files have tokens for 3 of 4 steps": lambda: None,
        "has 35 tokens, and says 36": lambda: tokens_in(first, np.arange(35), said=36),
        "is not a file of tokens": lambda: first.write_bytes(b"no tokens at all"),
    }
    for told, break_it in broken.items():
        break_it()
        with pytest.raises(SystemExit, match=told):
            list(job.batches(4, 4, 0))


def test_no_token_sees_a_later_one_and_places_are_relative():
    model = fineweb.GPT(layers=2, width=32, heads=2, vocabulary=64)
    key = jax.random.key(0)
    params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
    drawn = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), params)
    logits = functools.partial(model.apply, {"params": drawn})
    tokens = jnp.arange(8)[None]
    moved = (logits(tokens) != logits(tokens.at[0, 5].set(60)))[0].any(-1)
    assert list(moved) == [False] * 5 + [True] * 3
    q, k = jax.random.normal(key, (2, 1, 1, 1, 16))
    q, k = (fineweb.rotated(jnp.broadcast_to(x, (1, 9, 1, 16))) for x in (q, k))
    scores = jnp.einsum("bqhd,bkhd->qk", q, k)
    np.testing.assert_allclose(scores[5, 2], scores[8, 5], rtol=1e-4)
    assert abs(scores[5, 2] - scores[5, 3]) > 0.01


def test_the_track_has_its_model_and_its_rule(results):
    model = fineweb.GPT(12, 768, 6, fineweb.VOCABULARY)
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    layer = 12 * 768**2 + 9 * 768 + 2 * 768  # matrices, their biases, two norms
    ends = 2 * 768 + 2 * 768 * fineweb.VOCABULARY + fineweb.VOCABULARY
    assert elements(shapes) == 12 * layer + ends
    for setting, methods in grid.TRACK.items():
        assert setting.workers * setting.batch == fineweb.SEQUENCES
        assert min(setting.middle(METHODS[method].rate) for method in methods) > 0
    setting = next(iter(grid.TRACK))
    for method, loss in (("AdamW", 3.2777), ("adamw, H 1", 3.2776)):
        do_all(results, method, loss, setting)
    text = page.markdown(report.track_table(setting, report.cells(setting, results)))
    reached = [line.split("|")[4].strip() for line in text.splitlines()[4:6]]
    assert reached == ["no", "yes"]  # 0.0023 sqrt(3) is below 0.004


# At most six more; down to where it trains.
@pytest.mark.parametrize(("best", "more"), [(0, 0), (2, 2), (9, 6), (-3, -3)])
def test_a_sweep_widens_where_its_best_is_at_an_end(results, best, more):
    further = range(2, 2 + more) if more > 0 else range(-2, -2 + more, -1)

    def power(run):
        return round(2 * math.log2(run.rate / METHODS["LAMB"].rate))

    def loss(run):  # above its best it diverges
        return best - power(run) if power(run) <= best else None

    runs = do_all(results, "LAMB", loss)
    rest = [(min(best, 7), seed) for seed in SEEDS[1:]]
    assert [(power(r), r.seed) for r in runs] == [
        (p, 0) for p in (-1, 0, 1, *further)
    ] + rest
    reread = Results(results.path)  # nothing is missing
    assert list(sweep.missing(SETTING, "LAMB", reread)) == []
    assert len(sweep.finished(SETTING, "LAMB", reread)) == len(SEEDS)


def test_at_two_rates_the_first_of_all_methods_is_first(results):
    pairs = [(grid.TINY, method) for method in grid.METHODS_OF[grid.TINY]]
    due = [(x.method, x.rate) for x in sweep.all_missing(pairs, results)]
    ours, theirs = (
        float(f"{grid.TINY.middle(METHODS[method].rate):.3g}") for _, method in pairs
    )
    assert due[:2] == [("AdamW", ours), ("adamw, H 1", theirs)]
    assert [method for method, _ in due] == ["AdamW", "adamw, H 1"] * 2
    for _, method in pairs:
        assert len(do_all(results, method, lambda run: run.rate, grid.TINY)) == 2
    assert list(sweep.all_missing(pairs, results)) == []
    cells = report.cells(grid.TINY, results)
    assert [(cell.loss, cell.tuned) for cell in cells.values()] == [
        (ours, 2), (theirs, 2)
    ]  # fmt: skip


def test_when_its_budget_is_spent_it_says_so_and_ends(tmp_path, capsys):
    command.main(command.Config(grid="tiny", budget=0.0, out=tmp_path))
    assert "The budget of 0 s is spent: not started." in capsys.readouterr().out
    assert not (tmp_path / "tiny.jsonl").exists()


def test_a_method_or_a_pair_is_meant_whole_and_wrong_arguments_are_named(tmp_path):
    muon = f"{CORE[1]} muon, H 1"
    for only, count in (("AdamW", len(CORE)), (muon, 1), (f"{muon}x", 0)):
        chosen = command.pairs(command.Config(only=(only, f"{CORE[0]} Lion")))
        assert len(chosen) == count + 1
    with pytest.raises(SystemExit, match="no run has any of nothing"):
        command.pairs(command.Config(only=("nothing",)))
    lion = (f"{CORE[1]} Lion",)
    for told, options in {
        "--seeds: benchmarks/results has them": {"seeds": 1},
        "--seeds must be >= 1: 0": {"seeds": 0},
        "has no sweep of these runs": {"seeds": 1, "only": lion, "out": tmp_path},
    }.items():
        with pytest.raises(SystemExit, match=told):
            command.main(command.Config(**options))
    (tmp_path / "r.jsonl").write_text('{"key": {}}\nhalf a li')
    with pytest.raises(SystemExit, match=r"r.jsonl:2 is not a result"):
        Results(tmp_path / "r.jsonl")


SMALL, WHOLE = ("all-reduce", 4 * 430), ("all-reduce", 4 * 4030)
SLICE = 4 * (64 + 4) + 1 * (32 + 4)
SIGNS = 2 * (64 + 4) + 1 * (32 + 4)  # of 8 blocks of 512, and one of 256


@pytest.mark.parametrize(
    ("name", "by_steps"),
    [
        # The mean of all parameters follows the last step, where replicas differ.
        ("SLAMB, as published", {100: (100, 2), 101: (101, 2)}),
        # 13 blocks of 320 of the one and one of 160 of the other leaf, five to a byte,
        # a scale of 4 bytes each, in 4 slices of whole blocks.
        ("slamb, H 1", {9: (9,)}),
        # After a step of an outer optimizer all replicas are equal.
        ("MuLoCo, H 30, outer 1 0", {29: (1,), 30: (1,), 60: (2,)}),
        ("1-bit LAMB", {9: (9,), 12: (10, 2)}),  # the warm-up is a fifth of 50 steps
    ],
)
def test_the_bytes_of_all_steps_are_counted(name, by_steps):
    payloads = {
        "SLAMB, as published": [SMALL, WHOLE],
        "slamb, H 1": [("all-to-all", 2 * 4 * SLICE)],  # to the owners, and back
        "1-bit LAMB": [WHOLE, ("all-to-all", 2 * 4 * SIGNS)],
    }.get(name, [WHOLE])
    like = {"big": (100, 40), "small": (30,)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in like.items()}
    made = make(name, optax.constant_schedule(1.0), SETTING)
    until = sends_of(made, params, 4)
    for steps, times in by_steps.items():
        found = {(kind, nbytes): often for kind, nbytes, often in until(steps)}
        assert found == dict(zip(payloads, times, strict=False)), steps


def test_a_warm_up_is_another_optimizer_with_the_same_state():
    made = Made(optax.sgd(1.0), first=optax.sgd(10.0), warmup=2)
    state, steps = made.optimizer.init(jnp.float32(0)), []
    for _ in range(3):
        u, state = jax.jit(made.optimizer.update)(jnp.float32(1), state)
        steps.append(float(u))
    assert steps == [-10, -10, -1]


def test_the_best_outer_step_counts_and_all_runs_are_counted(results):
    for method, loss in (("0.7 0.9", 1.2), ("1 0.5", 1.1), ("1 0", 1.3)):
        do_all(results, f"DiLoCo, H 30, outer {method}", loss)
    do_all(results, DENSE, 1.0)
    found = report.cells(SETTING, results)
    assert list(found) == [DENSE, "DiLoCo, H 30, outer 1 0.5"]
    assert found[DENSE].bytes == 50 * 1.5 * 4000
    # Alike at all rates: the sweep goes on to the lowest.
    each = len(sweep.POWERS) + sweep.FURTHER
    assert [cell.tuned for cell in found.values()] == [each, 3 * each]
    assert report.variant_of("muon, outer, H 30, outer 1 0.5") == "muon, outer, H 30"
    assert report.spread([1.0, 2.0]) == "1.500 ± 0.707"  # over seeds
    assert report.spread([float("inf"), 1.0]) == "diverged"
    above = report.above_dense(found)
    assert above[DENSE] == [(1.0, 0.0, 0.0)]
    assert above["DiLoCo"] == [(1.0, pytest.approx(10.0), 0.0)]


def test_a_claim_is_tried_on_pairs():
    """Seeds that differ cancel; p is a half at the margin, and is small below it."""
    dense = [1.0, 3.0, 2.0, 5.0]
    noise = np.array([-0.001, 0.001, -0.002, 0.002])
    at = paired(list(dense * np.exp(noise + math.log1p(grid.MARGIN))), dense)
    half = 3.182446 * np.std(noise, ddof=1) / 2  # Student's t, three degrees of freedom
    want = (0.5, math.log1p(grid.MARGIN), at.mean - half, at.mean + half)
    assert (at.p, at.mean, at.low, at.high) == pytest.approx(want)
    below = paired(list(dense * np.exp(noise)), dense)
    assert below.seeds == 4
    assert below.p < 0.005


def test_a_gap_that_grows_with_the_size_is_found(results):
    """Planted: 3 % at a million parameters, 2 points more for ten times as many."""
    noise = dict(zip(SEEDS, (-0.001, 0.002, -0.001), strict=True))
    for setting in grid.SCALE[:3]:
        more = math.log10(scale.parameters(setting.task) / 1e6)
        for method, above in (
            ("AdamW", 0.1),
            ("AdamW, b1 0.8", 0.0),  # the better dense one
            ("adamw, H 1", 0.03 + 0.02 * more),
            ("adamw, b1 0.8, H 1", 0.2),
        ):
            loss = {seed: math.exp(above + noise[seed]) for seed in SEEDS}
            do_all(results, method, lambda run, loss=loss: loss[run.seed], setting)
    found = scale.gaps("adamw, 1/19", results)
    assert [gap.parameters for gap in found] == [23_008, 52_320, 120_576]
    assert found[0].half_interval == pytest.approx(0, abs=1e-12)  # the noise is paired
    assert scale.line(found) == pytest.approx((0.03, 0.02, 0.0), abs=1e-9)
    assert scale.line(found[:2]) is None
    assert scale.gaps("muon, 1/18", results) == []
    assert scale.length_table(results) is None
    for method, loss in (("AdamW", 1.0), ("AdamW, b1 0.8", 2.0)):
        do_all(results, method, loss, grid.LONGER[0])
        do_all(results, method.lower() + ", H 1", 1.05, grid.LONGER[0])
    shown = scale.length_table(results)
    assert [column.header for column in shown.columns][1:] == ["125 steps", "500 steps"]
    assert list(shown.columns[2].cells) == ["+5.0 ± 0.0"]


OURS = {  # methods at one size, and at others
    "ternary": ("adamw, b1 0.8, H 1", "adamw, 1/19"),
    "largest_of_7": ("adamw, largest of 7", "adamw, 1/45"),
    "largest_of_31": ("adamw, largest of 31", None),
    "largest_of_127": ("adamw, largest of 127", None),
}


@pytest.mark.parametrize("payload", RECORDED)
def test_what_the_advisor_says_of_losses_is_recorded(payload):
    def in_percent(*logs):
        return [100 * math.expm1(x) for x in logs]

    one, others = OURS[payload]
    seen = Results(RESULTS / "frontier.jsonl")
    names = one, "AdamW, b1 0.8"
    both = [losses_on_seeds(grid.NOISY, name, seen) for name in names]
    if not both[0]:  # with other seeds
        done = [report.cells(grid.NOISY, seen)[name] for name in names]
        both = [cell.losses for cell in done]
    test = paired(*both)
    ends, sizes = [test.low, test.high], [scale.parameters(grid.NOISY.task)]
    for gap in scale.gaps(others, Results(RESULTS / "scale.jsonl")) if others else ():
        ends += [gap.mean - gap.half_interval, gap.mean + gap.half_interval]
        sizes.append(gap.parameters)
    known, near = RECORDED[payload], functools.partial(pytest.approx, abs=0.06)
    interval = in_percent(min(ends), max(ends))
    assert known == Recorded(near(interval), (min(sizes), max(sizes)))


def test_runs_made_again_stand_beside_the_recorded_ones(results, tmp_path):
    pairs = [(SETTING, DENSE), (SETTING, "adamw, H 1"), (SETTING, "Lion")]
    for (_, method), loss in zip(pairs[:2], (2.0, 2.2), strict=True):
        do_all(results, method, lambda run, loss=loss: loss + 0.1 * run.seed)
    runs = anew.runs_again(pairs, 2, results)  # Lion was never run
    assert [(run.method, run.seed) for run in runs] == [
        (method, seed) for _, method in pairs[:2] for seed in (0, 1)
    ]
    assert {run.rate for run in runs if run.method == DENSE} == {
        sweep.best_rate(SETTING, DENSE, results)
    }
    fresh = Results(tmp_path / "fresh.jsonl")
    assert anew.compared(pairs, fresh, results) is None
    for run in runs:
        found = json.loads(json.dumps(results.get(run.key())))
        found["points"][-1]["loss"] *= 1.01
        fresh.add(found)
    shown = anew.compared(pairs, fresh, results)
    column = {x.header: list(x.cells) for x in shown.columns}
    assert column["seeds"] == ["0, 1", "0, 1"]
    assert column["loss"] == ["2.071 ± 0.071", "2.273 ± 0.071"]
    assert column["recorded"] == ["2.050 ± 0.071", "2.250 ± 0.071"]
    assert column["all recorded"] == ["2.100 ± 0.100", "2.300 ± 0.100"]
    assert column["off, %"] == ["+1.00", "+1.00"]
    assert column["above the first, %"] == column["recorded so"] == ["+0.0", "+9.8"]
    # Tables of the fresh runs have the recorded rates, and no recorded run.
    assert report.cells(SETTING, fresh) == {}
    cells = report.cells(SETTING, Results(fresh.path, tuned=results))
    assert [len(cell.runs) for cell in cells.values()] == [2, 2]
    assert cells[DENSE].loss == pytest.approx(2.0705)


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.jsonl")))
def test_the_recorded_page_is_that_of_the_recorded_data(name, tmp_path, monkeypatch):
    recorded = RESULTS / f"{name}.jsonl"
    shutil.copy(recorded, tmp_path)
    drawn: list[Setting] = []
    monkeypatch.setattr(
        page.pictures, "by_setting", lambda found, _: drawn.extend(found)
    )
    results = Results(tmp_path / recorded.name)
    path = page.write_page(grid.GRIDS[name], results, Console(file=io.StringIO()))
    assert path.read_text() == recorded.with_suffix(".md").read_text()
    for line in recorded.read_text().splitlines():
        key = json.loads(line)["key"]
        setting = Setting(*(key.pop(k) for k in ("task", "workers", "batch", "steps")))
        assert setting in drawn
        method, _, _ = (key.pop(k) for k in ("method", "rate", "seed"))
        # Found again, or of a setting that was dropped: see benchmarks/README.md.
        known = METHODS[method].key if method in METHODS else None
        assert key == json.loads(json.dumps(known)) or "average_b2" in key


def test_a_run_of_one_method_keeps_the_page_of_all(tmp_path, monkeypatch):
    shutil.copy(RESULTS / "frontier.jsonl", tmp_path)
    monkeypatch.setattr(command, "RECORDED", tmp_path)
    monkeypatch.setattr(page.pictures, "by_setting", lambda *_: None)
    monkeypatch.setattr(page.pictures, "by_bytes", lambda *_: None)
    command.main(command.Config(only=("byte_lm-8x8-300 LAMB",), out=tmp_path))
    recorded = (RESULTS / "frontier.md").read_text()
    assert (tmp_path / "frontier.md").read_text() == recorded


@pytest.mark.long
def test_the_command_sweeps_and_draws_and_a_run_that_diverges_ends(tmp_path):
    diverged = execute(Run(SETTING, "AdamW", 1e30, 0), tmp_path)
    assert [point["loss"] for point in diverged["points"]] == [None]
    path = tmp_path / "smoke.jsonl"
    options = ["--grid", "smoke", "--only", "AdamW", "--out", tmp_path]
    programs.ended("-m", "benchmarks.frontier", *options)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) >= len(sweep.POWERS) + len(SEEDS) - 1
    d = scale.parameters("digits")
    first, *_, last = next(r["points"] for r in found if "points" in r)
    assert last["loss"] < first["loss"]
    assert (last["step"], last["exchanges"]) == (50, [["all-reduce", 4 * d, 50]])
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(("best", "start"), [(3, 0), (-2, 0), (0, 0)])
def test_the_rate_of_the_lowest_loss_is_found(best, start):
    tried = []

    def at(power):
        tried.append(power)
        return abs(power - best)

    assert lowest(at, start) == best
    assert {best - 1, best + 1} < set(tried)  # not at an end of what was tried


def test_rates_lie_a_root_of_two_apart_to_three_digits():
    assert [rate_of(0.02, power) for power in (-2, -1, 0, 1)] == [
        0.01, 0.0141, 0.02, 0.0283,
    ]  # fmt: skip


def test_a_run_is_made_once_and_a_loss_that_is_not_finite_is_infinite(tmp_path):
    results = Results(tmp_path / "runs.jsonl")
    made = iter([1.5, float("nan")])
    for key, end in (({"seed": 0}, 1.5), ({"seed": 1}, np.inf)):
        assert results.once(key, lambda: next(made)) == end
        again = Results(results.path)
        assert again.once(key, lambda: pytest.fail("made again")) == end
