"""The frontier's command: resumes, sweeps, counts; and its arithmetic."""

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("sklearn")

from benchmarks.frontier import sweep
from benchmarks.frontier.__main__ import Config, cells, estimate, run_all
from benchmarks.frontier.grid import CORE, FULL, SEEDS, Setting
from benchmarks.frontier.methods import MAIN, METHODS, PAYLOADS, sends
from benchmarks.frontier.overview import overview
from benchmarks.frontier.report import seconds, sent_bytes, spread, step_seconds
from benchmarks.frontier.results import Results
from benchmarks.frontier.run import Run, timing, timing_key
from benchmarks.frontier.seconds import LATENCY, exchange_seconds
from benchmarks.frontier.tasks import MASKED, task
from benchmarks.frontier.versus import versus
from slamb_jax import recipes
from tests.workers import random_tree

ROOT = Path(__file__).parents[1]
SETTING = Setting("digits", 4, 4, 50)


@pytest.fixture(autouse=True)
def _promotion():
    with (
        jax.numpy_dtype_promotion("standard"),  # flax needs both
        jax.numpy_rank_promotion("allow"),
    ):
        yield


@pytest.mark.parametrize(("name", "classes"), [("masked_lm", 257), ("digits", 10)])
def test_tasks_start_from_guessing(name, classes):
    job = task(name)
    params = job.init(jax.random.key(0))
    loss = float(jax.jit(job.loss)(params, job.held_out))
    assert loss == pytest.approx(math.log(classes), abs=0.6)
    once, again = (list(job.batches(6, 2, 3)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert {len(x) for x in jax.tree.leaves(once)} == {6}
    other = next(job.batches(6, 2, 4))
    assert any((once[0][key] != other[key]).any() for key in other)


def test_masked_bytes_are_distinct_and_only_they_count():
    job = task("masked_lm")
    (batch,) = job.batches(4, 1, 0)
    places = batch["places"]
    assert places.shape == (4, MASKED)
    assert all(len(set(row)) == MASKED for row in places.tolist())
    params = job.init(jax.random.key(0))
    row = np.arange(4)[:, None]

    def probability(byte):  # that the masked bytes are all this one, on average
        changed = batch["bytes"].copy()
        changed[row, places] = byte
        one = {"bytes": changed[:1], "places": places[:1, :1]}
        one["bytes"][0, places[0, 1:]] = 0  # visible now, and fixed
        return np.exp(-float(loss(params, one)))

    loss = jax.jit(job.loss)
    total = sum(probability(byte) for byte in range(256))
    assert 0.9 < total < 1  # a place that saw its byte would not add up; MASK has some


def command(*arguments):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.frontier", "--grid", "smoke", *arguments],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_command_sweeps_and_goes_on(tmp_path):
    path = tmp_path / "r.jsonl"
    here = ("--results", str(path), "--only", "SGD-M")
    done = command(*here)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(results) >= len(sweep.POWERS) + len(SEEDS) - 1
    assert len({json.dumps(r["key"]) for r in results}) == len(results)
    best = min(results, key=lambda r: r["points"][-1]["loss"])
    assert best["points"][-1]["loss"] < 0.6 < best["points"][0]["loss"]
    assert best["points"][-1]["exchanges"] == [["all-reduce", 4 * 38282, 50]]
    assert "SGD-M" in done.stdout
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
    # What is there is not run again.
    config = Config("smoke", only=("SGD-M", "AdamW"), budget=-1, results=path)
    assert run_all_of(dataclasses.replace(config, only=("SGD-M",))) == ""
    assert "budget of -1 s is spent" in run_all_of(config)
    assert len(path.read_text().splitlines()) == len(results)


def run_all_of(config):
    out = io.StringIO()
    run_all(config, Results(config.results), Console(file=out))
    return out.getvalue()


def test_wrong_arguments_are_named(tmp_path):
    done = command("--only", "no such cell")
    assert done.returncode != 0
    assert "no cell has any of no such cell" in done.stderr
    (tmp_path / "r.jsonl").write_text('{"key": {}}\nhalf a li')
    done = command("--results", str(tmp_path / "r.jsonl"), "--report")
    assert "r.jsonl:2 is not a result" in done.stderr


def result(run, loss, **rest):
    point = {"step": 50, "loss": loss, "exchanges": [["all-reduce", 4000, 50]]}
    return {"key": run.key(), "points": [point], **rest}


def swept(tmp_path, loss_of):
    """The runs of a cell whose loss is a function of the rate's step in the sweep."""
    results = Results(tmp_path / "r.jsonl")
    middle = METHODS["LAMB"].rate
    runs = []
    for run in sweep.missing(SETTING, "LAMB", results):
        power = round(2 * math.log2(run.rate / middle))
        runs.append((power, run.seed))
        results.add(result(run, loss_of(power)))
    return runs, results


@pytest.mark.parametrize(
    ("best", "powers"),
    [
        (0, [-1, 0, 1]),
        (2, [-1, 0, 1, 2, 3]),
        (9, [-1, 0, 1, 2, 3, 4, 5, 6, 7]),  # six more at most
        (-3, [-1, 0, 1, -2, -3, -4]),
    ],
)
def test_a_sweep_widens_where_its_best_stands_at_an_end(tmp_path, best, powers):
    runs, results = swept(tmp_path, lambda power: abs(power - best))
    rest = [(min(best, 7), seed) for seed in SEEDS[1:]]
    assert runs == [(p, 0) for p in powers] + rest
    assert len(sweep.finished(SETTING, "LAMB", results)) == len(SEEDS)
    again = Results(tmp_path / "r.jsonl")  # read back: nothing is missing
    assert list(sweep.missing(SETTING, "LAMB", again)) == []


def test_a_diverged_run_is_no_best_rate(tmp_path):
    runs, results = swept(tmp_path, lambda power: None if power > -1 else -power)
    assert runs[-1] == (-1, SEEDS[-1])
    assert sweep.best_rate(SETTING, "LAMB", results) == pytest.approx(
        METHODS["LAMB"].rate / 2**0.5, rel=1e-2
    )
    runs, _ = swept(tmp_path / "low", lambda power: None if power > -4 else -power)
    assert runs[-1] == (-4, SEEDS[-1])  # the sweep went down to where it trains
    assert spread([float("inf"), 1.0]) == "diverged"
    assert spread([1.0, 2.0]) == "1.500 ± 0.707"


def test_a_rival_is_set_beside_slamb_at_no_more_bytes(tmp_path):
    """Or where it sends less than any, beside the SLAMB that sends the fewest."""
    results = Results(tmp_path / "r.jsonl")
    done = {  # loss, and elements in 50 all-reduces
        "LAMB": (1.0, 1000), "SLAMB, FLOAT32": (1.2, 100),
        "SLAMB, FEW_BYTES": (1.5, 20), "1-bit LAMB": (1.25, 200),
        "DeMo": (1.4, 50), "DiLoCo": (1.0, 10), "AdamW": (0.9, 1000),
    }  # fmt: skip
    for method, (loss, elements) in done.items():
        for run in sweep.missing(SETTING, method, results):
            made = result(run, loss)
            made["points"][0]["exchanges"] = [["all-reduce", 4 * elements, 50]]
            results.add(made)
    table = versus(SETTING, results)
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["1-bit LAMB", "DeMo", "DiLoCo"]
    assert columns[1] == ["0.2000", "0.0500", "0.0100"]
    assert columns[3] == ["SLAMB, FLOAT32", "SLAMB, FEW_BYTES", "SLAMB, FEW_BYTES"]
    assert columns[6] == ["-4.0", "+7.1", "+50.0"]
    assert versus(dataclasses.replace(SETTING, workers=5), results) is None


def test_the_overview_has_each_method_beside_lamb(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    other = dataclasses.replace(SETTING, workers=5)
    done = {
        (SETTING, "LAMB"): (1.0, 1000), (SETTING, "SLAMB, FLOAT32"): (1.2, 100),
        (other, "LAMB"): (2.0, 1000), (other, "SLAMB, FLOAT32"): (1.9, 120),
        (other, "DeMo"): (None, 50),
    }  # fmt: skip
    for (setting, method), (loss, elements) in done.items():
        for run in sweep.missing(setting, method, results):
            made = result(run, loss)
            made["points"][0]["exchanges"] = [["all-reduce", 4 * elements, 50]]
            results.add(made)
    assert overview([SETTING], results) is None  # one setting has a table of its own
    columns = [list(c.cells) for c in overview([SETTING, other], results).columns]
    assert columns == [
        ["LAMB", "SLAMB, FLOAT32", "DeMo"],
        ["1.000", "0.100 to 0.120", ""],  # what diverges ends before all is sent
        ["+0.0", "+20.0", ""],
        ["+0.0", "-5.0", "diverged"],
    ]


def test_long_runs_take_the_rates_of_short_ones():
    long = Setting("byte_lm", 16, 2, 1000)
    assert long.tuned_on() == long.short() == Setting("byte_lm", 16, 2, 200)
    long = Setting("digits", 16, 4, 1000)  # where a run takes seconds: their own
    assert long.tuned_on() == long != long.short()
    assert set(CORE) < set(FULL)
    core, full = (set(cells(Config(grid))) for grid in ("core", "full"))
    assert core < full
    assert {method for _, method in core} == set(METHODS) > set(MAIN)
    assert len(set(FULL)) == 38


def test_seconds_are_those_timed_beside_the_others(tmp_path):
    results = Results(tmp_path / "r.jsonl")
    for i, run in enumerate(sweep.missing(SETTING, "LAMB", results)):
        results.add(result(run, 1.0, step_seconds=0.1 * i))
    under_load = step_seconds(SETTING, "LAMB", results)
    assert under_load > 0
    timed = timing(SETTING, "LAMB", steps=2)
    assert timed["first_seconds"] > timed["step_seconds"] > 0
    assert timed["dense_seconds"] == timed["step_seconds"]
    results.add(timed | {"step_seconds": 0.3, "dense_seconds": 0.3})
    other = {"key": timing_key(SETTING, "DeMo"), "step_seconds": 0.6}
    results.add(other | {"dense_seconds": 0.4})  # on a slower day
    assert step_seconds(SETTING, "DeMo", results) == pytest.approx(0.45)
    long = dataclasses.replace(SETTING, steps=5000)
    assert timing_key(long.short(), "LAMB") == timing_key(long, "LAMB")
    again = Results(tmp_path / "r.jsonl")
    assert step_seconds(SETTING, "LAMB", again) == 0.3 != under_load


def test_the_estimate_counts_each_methods_sweep(tmp_path):
    digits, long = Setting("digits", 16, 4, 1000), Setting("byte_lm", 4, 48, 900)
    config = Config(only=(f"{digits} LAMB", f"{digits} DeMo", f"{long} LAMB"))
    config = dataclasses.replace(config, results=tmp_path / "r.jsonl")
    results = Results(config.results)
    for setting, method in cells(config):
        key = timing_key(setting, method)
        results.add({"key": key, "step_seconds": 0.06, "first_seconds": 0.0})
    printed = io.StringIO()
    estimate(config, Console(file=printed))
    minutes = [line.split(" min  ") for line in printed.getvalue().splitlines()[:-1]]
    found = {setting: float(took) for took, setting in minutes}
    # Four rates of the sweep, one of them the first seed's where it is not shorter.
    assert found[str(digits)] == 2 * (4 + 2) * 1000 * 0.001
    assert found[str(long)] == (4 * 200 + 3 * 900) * 0.001


def test_bytes_and_seconds_of_a_run():
    run = Run(SETTING, "LAMB", 0.02, 0)
    (point,) = result(run, 1.0)["points"]
    assert sent_bytes(point, 4) == 50 * 1.5 * 4000
    link = 1e6
    exchange = 50 * (1.5 * 8 * 4000 / link + 6 * LATENCY)
    assert seconds(0.4, point, 4, link) == pytest.approx(50 * 0.1 + exchange)
    gathered = exchange_seconds([("all-gather", 100), ("all-to-all", 400)], 4, link)
    assert gathered == pytest.approx(
        3 * (800 / link + LATENCY) + 0.75 * 3200 / link + LATENCY
    )


def test_what_slamb_sends_is_counted_as_it_packs():
    params = random_tree({"big": (100, 40), "small": (30,)}, 0)
    method = METHODS["SLAMB, FLOAT32"]
    plain = sends(method, params, SETTING, 2)
    assert plain == [("all-reduce", 4 * (400 + 30))]
    assert sends(method, params, SETTING, 71) == [*plain, ("all-reduce", 4 * 4030)]
    coded = sends(METHODS["SLAMB, FEW_BYTES"], params, SETTING, 2)
    # 1,030 elements in 4 slices of 258, each in 2 blocks of 130 codes.
    assert coded == [("all-to-all", 4 * 138), ("all-gather", 138)]
    mixed = sends(METHODS["SLAMB, LARGE_BATCH"], params, SETTING, 15)
    # 1,364 elements in 4 slices of 341, in 2 blocks of 172; of the parameters slices of
    # 1,008 in 4 blocks: 504 bytes there, 1,008 back, and the scales.
    third, average = mixed[:2], mixed[2:]
    assert third == [("all-to-all", 4 * 180), ("all-gather", 180)]
    assert average == [("all-to-all", 4 * 520), ("all-gather", 1024)]


@pytest.mark.parametrize("name", ["FLOAT32", "FEW_BYTES", "NOISY", "LARGE_BATCH"])
def test_its_slambs_are_the_recipes(name):
    settings = dict(METHODS[f"SLAMB, {name}"].settings)
    sent = {
        "payload": PAYLOADS[settings.pop("payload")],
        "average_payload": PAYLOADS[settings.pop("average")],
    }
    whole = {"payload": None, "average_payload": None}
    assert settings | sent == whole | dict(getattr(recipes, name))
