"""Frontier: sweeps that resume, bytes that are counted, a report from the data."""

import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

pytest.importorskip("sklearn")

from benchmarks.frontier import __main__ as command
from benchmarks.frontier import page, sweep
from benchmarks.frontier.grid import CORE, SEEDS, Setting
from benchmarks.frontier.methods import METHODS, exchanges, make
from benchmarks.frontier.report import LINKS, cells, overview, rivals_table, spread
from benchmarks.frontier.results import Results
from benchmarks.frontier.run import Run, execute, timing, timing_key
from benchmarks.frontier.tasks import task
from tests.programs import standard_promotion

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "benchmarks" / "results" / "frontier.jsonl"
SETTING = Setting("digits", 4, 4, 50)
OTHER = dataclasses.replace(SETTING, workers=5)


@pytest.fixture(autouse=True)
def _promotion() -> Iterator[None]:
    with standard_promotion():
        yield


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "r.jsonl")


def result(run: Run, loss: float | None, elements: int = 1000, **rest: Any) -> Any:
    exchanged = [["all-reduce", 4 * elements, 50]]
    point = {"step": 50, "loss": loss, "exchanges": exchanged}
    known = {"step_seconds": 0.1, "run_seconds": 0.0, "hardware": "none"}
    return {"key": run.key(), "points": [point], **known, **rest}


def do_all(
    results: Results, setting: Setting, method: str, **given: Callable[[Run], Any]
) -> list[Run]:
    """Adds a result for every run that is missing."""
    runs = []
    for run in sweep.missing(setting, method, results):
        runs.append(run)
        results.add(result(run, **{name: of(run) for name, of in given.items()}))
    return runs


def columns_of(table: Table | None) -> list[list[Any]]:
    assert table is not None
    return [list(column.cells) for column in table.columns]


def test_a_task_starts_from_guessing_and_repeats_its_batches() -> None:
    job = task("digits")
    loss = float(jax.jit(job.loss)(job.init(jax.random.key(0)), job.held_out))
    assert loss == pytest.approx(math.log(10), abs=0.6)
    once, again, other = (list(job.batches(6, 2, seed)) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert {len(x) for x in jax.tree.leaves(once)} == {6}
    assert any((once[0][key] != other[0][key]).any() for key in other[0])


@pytest.mark.parametrize(
    ("best", "powers"),
    [
        (0, [-1, 0, 1]),
        (2, [-1, 0, 1, 2, 3]),
        (9, [-1, 0, 1, 2, 3, 4, 5, 6, 7]),  # six more at most
        (-3, [-1, 0, 1, -2, -3, -4]),
    ],
)
def test_a_sweep_widens_where_its_best_is_at_an_end(
    results: Results, best: int, powers: list[int]
) -> None:
    middle = METHODS["LAMB"].rate

    def power(run: Run) -> int:
        return round(2 * math.log2(run.rate / middle))

    runs = do_all(results, SETTING, "LAMB", loss=lambda run: abs(power(run) - best))
    rest = [(min(best, 7), seed) for seed in SEEDS[1:]]
    assert [(power(r), r.seed) for r in runs] == [(p, 0) for p in powers] + rest
    again = Results(results.path)  # read back: nothing is missing
    assert list(sweep.missing(SETTING, "LAMB", again)) == []
    assert len(sweep.finished(SETTING, "LAMB", again)) == len(SEEDS)


def test_a_sweep_goes_down_to_where_it_trains(results: Results) -> None:
    lowest = METHODS["LAMB"].rate / 3.9  # two octaves down
    runs = do_all(
        results,
        SETTING,
        "LAMB",
        loss=lambda run: None if run.rate > lowest else 1 / run.rate,
    )
    assert runs[-1].rate == pytest.approx(METHODS["LAMB"].rate / 4, rel=1e-2)
    assert spread([float("inf"), 1.0]) == "diverged"
    assert spread([1.0, 2.0]) == "1.500 ± 0.707"


def test_long_runs_take_the_rates_of_short_ones() -> None:
    long = Setting("byte_lm", 16, 2, 1000)
    assert long.tuned_on() == long.short() == Setting("byte_lm", 16, 2, 200)
    digits = Setting("digits", 16, 4, 1000)
    assert digits.tuned_on() == digits != digits.short()
    chosen = command.pairs(command.Config())
    assert chosen == [(s, m) for s in CORE for m in METHODS]
    assert timing_key(long, "LAMB") == timing_key(long.short(), "LAMB")


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no run has any of nothing"):
        command.pairs(command.Config(only=("nothing",)))
    (tmp_path / "r.jsonl").write_text('{"key": {}}\nhalf a li')
    with pytest.raises(SystemExit, match=r"r.jsonl:2 is not a result"):
        Results(tmp_path / "r.jsonl")


def test_runs_that_are_there_are_not_made_again(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(
        command, "execute", lambda run: made.append(run) or result(run, run.rate)
    )
    config = command.Config("smoke", only=("AdamW",), results=results.path)
    printed = io.StringIO()
    for budget in (math.inf, math.inf, -1.0):
        config = dataclasses.replace(config, budget=budget)
        command.run_all(config, Results(results.path), Console(file=printed))
    assert len(made) == len(set(made)) >= len(sweep.POWERS) + len(SEEDS) - 1
    assert "spent" not in printed.getvalue()
    config = dataclasses.replace(config, only=())
    command.run_all(config, Results(results.path), Console(file=printed))
    assert "budget of -1 s is spent" in printed.getvalue()


@pytest.mark.long
def test_a_run_records_losses_bytes_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(SETTING, "AdamW", 0.004, 0)
    found = json.loads(json.dumps(execute(run)))
    losses = [point["loss"] for point in found["points"]]
    assert losses[-1] < losses[0]
    d = sum(x.size for x in jax.tree.leaves(task("digits").init(jax.random.key(0))))
    last = found["points"][-1]
    assert (last["step"], last["exchanges"]) == (50, [["all-reduce", 4 * d, 50]])
    diverged = execute(dataclasses.replace(run, rate=1e30))
    assert [point["loss"] for point in diverged["points"]] == [None]
    timed = timing(SETTING, "LAMB", steps=2)
    assert timed["first_seconds"] > 0 < timed["step_seconds"]
    assert timed["dense_seconds"] == timed["step_seconds"]


@pytest.mark.long
def test_what_slamb_sends_is_counted_as_it_packs() -> None:
    like = {"big": (100, 40), "small": (30,)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in like.items()}

    def sends(name: str, step: int) -> list[tuple[str, float]]:
        return make(name, 1.0, SETTING).sends(params, 4, step)

    plain = [("all-reduce", 4 * (400 + 30))]
    assert sends("SLAMB, FLOAT32", 2) == plain
    assert sends("SLAMB, FLOAT32", 71) == [*plain, ("all-reduce", 4 * 4030)]
    # 1,030 elements in 4 slices of 258, each in 2 blocks of 130 codes.
    coded = [("all-to-all", 4 * 138), ("all-gather", 138)]
    assert sends("SLAMB, FEW_BYTES", 2) == coded
    # 1,364 elements in 4 slices of 341, in 2 blocks of 172; of the parameters slices of
    # 1,008 in 4 blocks: 504 bytes there, 1,008 back, and the scales.
    third = [("all-to-all", 4 * 180), ("all-gather", 180)]
    average = [("all-to-all", 4 * 520), ("all-gather", 1024)]
    assert sends("SLAMB, LARGE_BATCH", 15) == third + average
    rival = make("SLAMB, FLOAT32", 1.0, SETTING)
    # 70 steps and a last average, for the replicas differ after them.
    assert exchanges(rival, params, 4, 70) == [
        ["all-reduce", 4 * 430, 70], ["all-reduce", 4 * 4030, 2]
    ]  # fmt: skip
    assert exchanges(rival, params, 4, 71)[1] == ["all-reduce", 4 * 4030, 2]


def test_bytes_and_seconds_of_a_cell(results: Results) -> None:
    do_all(results, SETTING, "LAMB", loss=lambda run: 1.0)
    cell = cells(SETTING, results)["LAMB"]
    assert cell.bytes == 50 * 1.5 * 4000
    point, link = cell.runs[0]["points"][-1], LINKS["100 Mbit"]
    exchange = 50 * (1.5 * 8 * 4000 / link + 6 * 20e-6)
    assert cell.seconds_by(point, link) == pytest.approx(50 * 0.1 / 4 + exchange)
    do_all(results, SETTING, "DeMo", loss=lambda run: 1.0)
    slow = {"step_seconds": 0.6, "dense_seconds": 0.4}  # on a slower day
    results.add({"key": timing_key(SETTING, "DeMo"), **slow})
    results.add({"key": timing_key(SETTING, "LAMB"), "step_seconds": 0.3})
    assert cells(SETTING, results)["DeMo"].step_seconds == pytest.approx(0.45)


def test_a_rival_is_compared_with_slamb_at_no_more_bytes(results: Results) -> None:
    done = {  # loss, and elements in 50 all-reduces
        "LAMB": (1.0, 1000), "SLAMB, FLOAT32": (1.2, 100),
        "SLAMB, FEW_BYTES": (1.5, 20), "1-bit LAMB": (1.25, 200),
        "DeMo": (1.4, 50), "DiLoCo": (1.0, 10), "AdamW": (0.9, 1000),
    }  # fmt: skip
    for method, (loss, elements) in done.items():
        given = {"loss": lambda _, x=loss: x, "elements": lambda _, x=elements: x}
        do_all(results, SETTING, method, **given)
    columns = columns_of(rivals_table(SETTING, cells(SETTING, results)))
    assert columns[0] == ["1-bit LAMB", "DeMo", "DiLoCo"]
    assert columns[1] == ["0.2000", "0.0500", "0.0100"]
    # DiLoCo sends less than any: it stands beside the SLAMB that sends the fewest.
    assert columns[3] == ["SLAMB, FLOAT32", "SLAMB, FEW_BYTES", "SLAMB, FEW_BYTES"]
    assert columns[6] == ["-4.0", "+7.1", "+50.0"]
    assert rivals_table(OTHER, cells(OTHER, results)) is None


def test_the_overview_has_each_method_beside_lamb(results: Results) -> None:
    done = {
        (SETTING, "LAMB"): (1.0, 1000), (SETTING, "SLAMB, FLOAT32"): (1.2, 100),
        (OTHER, "LAMB"): (2.0, 1000), (OTHER, "SLAMB, FLOAT32"): (1.9, 120),
        (OTHER, "DeMo"): (None, 50),
    }  # fmt: skip
    for (setting, method), (loss, elements) in done.items():
        given = {"loss": lambda _, x=loss: x, "elements": lambda _, x=elements: x}
        do_all(results, setting, method, **given)
    assert overview([SETTING], results) is None  # one setting has a table of its own
    assert columns_of(overview([SETTING, OTHER], results)) == [
        ["LAMB", "SLAMB, FLOAT32", "DeMo"],
        ["1.000", "0.100 to 0.120", ""],  # a run that diverges ends early
        ["+0.0", "+20.0", ""],
        ["+0.0", "-5.0", "diverged"],
    ]


def test_the_estimate_counts_each_methods_sweep(results: Results) -> None:
    digits, long = Setting("digits", 16, 4, 1000), Setting("byte_lm", 4, 48, 900)
    only = (f"{digits} LAMB", f"{digits} DeMo", f"{long} LAMB")
    config = command.Config(only=only)
    for setting, method in command.pairs(config):
        key = timing_key(setting, method)
        results.add({"key": key, "step_seconds": 0.06, "first_seconds": 0.0})
    printed = io.StringIO()
    command.estimate(config, results, Console(file=printed))
    minutes = [line.split(" min  ") for line in printed.getvalue().splitlines()[:-1]]
    found = {setting: float(took) for took, setting in minutes}
    # Four rates of the sweep, one of them the first seed's where it is not shorter.
    assert found[str(digits)] == 2 * (4 + 2) * 1000 * 0.001
    assert found[str(long)] == (4 * 200 + 3 * 900) * 0.001


def test_the_recorded_page_is_that_of_the_recorded_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(RECORDED, tmp_path)
    drawn = []
    monkeypatch.setattr(page, "picture", lambda setting, *_: drawn.append(setting))
    results = Results(tmp_path / RECORDED.name)
    path = page.write_page(CORE, results, Console(file=io.StringIO()))
    assert path.read_text() == RECORDED.with_suffix(".md").read_text()
    assert drawn == list(CORE)
    here = {(str(s), m) for s in CORE for m in METHODS}
    for line in RECORDED.read_text().splitlines():  # none is of a method that is gone
        key = json.loads(line)["key"]
        long = Setting(*(key[k] for k in ("task", "workers", "batch", "steps")))
        tuned = {str(s) for s in CORE if long in (s, s.tuned_on(), s.short())}
        assert any((setting, key["method"]) in here for setting in tuned)


@pytest.mark.long
def test_the_command_sweeps_and_draws(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    path = tmp_path / "r.jsonl"
    options = ["--grid", "smoke", "--only", "AdamW", "--results", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.frontier", *options],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) >= len(sweep.POWERS) + len(SEEDS) - 1
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 10_000
