"""Time to loss: schedules, the recorded page, links that are shaped, and ends."""

import dataclasses
import functools
import math
import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.network import losses, namespaces, time_page, time_to_loss, timings
from benchmarks.network.losses import DENSE
from benchmarks.network.processes import workers
from benchmarks.train.grids import METHODS
from benchmarks.train.results import Results
from benchmarks.train.trials import SEEDS
from tests import programs

CONFIG = time_to_loss.Config(task="digits", steps=200, rates=(50.0,), round_trips=(1,))
SETTING = CONFIG.setting
OURS, NEVER = "adamw, H 1", "adamw, largest of 31"
pytestmark = pytest.mark.usefixtures("standard_promotion")
shaped = pytest.mark.skipif(
    namespaces.missing() is not None, reason=f"needs {namespaces.missing()}"
)


def loss_of(run, step):
    """Falls as 1 / steps; dense is twice as fast as others, NEVER's does not.

    OURS is as fast where its schedule is three times as long as dense.
    """
    above = abs(math.log(run.rate / METHODS[run.method].rate))
    if run.method == NEVER:
        return 3.0 + above
    long = run.method == OURS and run.setting.steps == 600
    return (50 if long or run.method == DENSE else 100) / step + above


@pytest.fixture
def results(tmp_path):
    """All runs on simulated workers."""
    found = Results(tmp_path / time_to_loss.RESULTS.name)
    for run in losses.absent(SETTING, found):
        steps = range(run.setting.steps // 4, run.setting.steps + 1, 25)
        points = [{"step": t, "loss": loss_of(run, t)} for t in steps]
        found.add({"key": run.key(), "points": points})
    return found


def test_a_loss_is_reached_on_the_line_between_two_evaluations():
    curve = [(10, 4.0), (20, 2.0), (30, 1.0)]
    reached = [losses.steps_to(curve, loss) for loss in (2.5, 5.0, 0.5)]
    assert reached == [17.5, 10, None]
    runs = [
        {"points": [{"step": 5, "loss": x}, {"step": 9, "loss": y}]}
        for x, y in ((2.0, 1.0), (4.0, None))
    ]
    assert losses.curve(runs) == [(5, 3.0)]


def test_the_schedule_that_reaches_dense_soonest_counts(results):
    assert losses.target(SETTING, results) == pytest.approx(0.25)
    for method in losses.METHODS:
        found = losses.best(SETTING, method, results)
        steps = {DENSE: 200, OURS: 600, NEVER: 800}.get(method, 400)
        assert {run["key"]["steps"] for run in found} == {steps}
        assert len(found) == (1 if method == NEVER else len(SEEDS))
        assert {run["key"]["rate"] for run in found} == {METHODS[method].rate}
    reread = Results(results.path)  # nothing is missing
    assert list(losses.absent(SETTING, reread)) == []


def test_the_recorded_page_is_that_of_the_recorded_data(tmp_path):
    config, recorded = time_to_loss.Config(), programs.ROOT / time_to_loss.RESULTS
    path = tmp_path / recorded.name
    path.write_text(recorded.read_text())
    measured = config.setting, config.links, config.checked, Results(path)
    page = time_page.write_page(*measured)
    assert page.read_text() == recorded.with_suffix(".md").read_text()


def test_what_is_missing_or_impossible_is_said(monkeypatch, results):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "no ip" in str(namespaces.missing())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.missing() == "root"
    config = dataclasses.replace(CONFIG, out=results.path.parent)
    with pytest.raises(SystemExit, match=r"iproute2; missing: root\."):
        time_to_loss.main(config)
    for name, value in {"rates": (200.0, 0.0), "workers": 201}.items():
        with pytest.raises(SystemExit, match=f"--{name}"):
            time_to_loss.main(time_to_loss.Config(**{name: value}))


def test_a_worker_that_ends_or_is_silent_ends_the_run():
    fine, silent = "print('report {}'); input()", "input()"
    broken = "print('the reason'); raise SystemExit(3)"
    for other, seconds, told in (
        (broken, 60, r"worker 1 ended \(3\)(.|\n)*the reason"),
        (silent, 1, r"workers \[.*1\] were silent for 1 s"),
    ):
        both = [[sys.executable, "-uc", code] for code in (fine, other)]
        with workers(both) as running, pytest.raises(RuntimeError, match=told):
            running.reports(seconds)
    assert [p.poll() for p in running.processes] == [-signal.SIGKILL] * 2


@shaped
@pytest.mark.long
def test_steps_on_links_are_as_late_as_they_are_and_send_what_is_reported(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(timings, "STEPS", 10)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    config = dataclasses.replace(CONFIG, rates=(1.0,), round_trips=(40.0,))
    messages = {OURS: 2, "adamw, outer, H 10, outer 1 0.5": 0.2}
    monkeypatch.setattr(time_to_loss, "TIMED", tuple(messages))
    results = Results(tmp_path / "steps.jsonl")
    wanted = functools.partial(time_to_loss.wanted, config, results)
    timings.on_links(config.workers, wanted, results, time_to_loss.Console())
    for method, count in messages.items():
        found = timings.pace(SETTING, method, config.checked, results)
        # Gloo adds some hundred bytes to an exchange.
        assert found.sent == pytest.approx(found.reported, rel=0.03, abs=1200)
        assert found.message > 0.02
        carried = 8 * found.sent / found.every / 1e6
        assert found.step > max(count * 0.02, 0.7 * carried)


def left_of(name):
    """Namespaces and hosts files whose names begin so."""
    folders = Path("/var/run/netns"), namespaces.HOSTS_FILES
    return [path for folder in folders for path in folder.glob(f"{name}*")]


def runs(pid):
    """Not one that has ended and waits for its parent's call."""
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@shaped
@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "hosts are made"), (signal.SIGTERM, "workers train")],
)
def test_an_interrupted_run_leaves_nothing(number, moment, results):
    # A shell's background jobs inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = ("--task", "digits", "--steps", "200", "--out", results.path.parent)
    run = programs.start("-m", "benchmarks.network.time_to_loss", *words)
    name = f"slamb-{run.pid}-"
    try:
        assert programs.wait_until(lambda: left_of(name))
        while moment == "workers train" and "steps:" not in run.stdout.readline():
            assert run.poll() is None
        ours = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        run.send_signal(number)
        _, told = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode != 0, told
    assert left_of(name) == []
    # An `ip` that was just started when the signal came ends by itself.
    assert programs.wait_until(lambda: not any(map(runs, ours)), seconds=60)
