"""Benchmark on slow links: its counters and processes; it leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import slamb_jax
from benchmarks.network import __main__ as benchmark
from benchmarks.network import model, namespaces
from benchmarks.network.counters import SHARE, Counters
from benchmarks.network.losses import BUCKETS, Results, Setting
from benchmarks.network.processes import workers
from benchmarks.network.worker import program
from tests import programs
from tests.optimizers import standard_promotion
from tests.workers import mesh_of

COMMAND = ("-m", "benchmarks.network")
shaped = pytest.mark.skipif(
    namespaces.missing() is not None, reason=f"needs {namespaces.missing()}"
)


def left_of(name):
    """Namespaces and hosts files whose names begin so."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    found = [x for x in listed.stdout.split() if x.startswith(name)]
    return found + [str(x) for x in namespaces.HOSTS_FILES.glob(f"{name}*")]


def test_headers_are_taken_off():
    acknowledged = 3 * 1514 + 66
    sent = Counters(acknowledged, 4, acknowledged, 4, 0)
    joined = Counters(3 * 1448 + 66, 1, 3 * 1514, 3, 0)  # as one packet, cut later
    assert sent.data_bytes == joined.data_bytes == 3 * 1448
    assert sent.header_share == pytest.approx(1 - 3 * 1448 / acknowledged)
    assert joined.header_share == pytest.approx(1 - SHARE)
    assert Counters(0, 0, 0, 0, 0).header_share == 0  # of a step that sends nothing


@pytest.mark.filterwarnings("ignore:after call")
@pytest.mark.parametrize("name", [*model.METHODS, BUCKETS, "adamw, largest of 7"])
def test_a_step_alone_sends_nothing(name):
    setting = Setting("digits", 4, 1, 8)
    with standard_promotion():  # optax.lamb needs it
        for is_alone in (True, False):
            made, _ = program(setting, name, mesh_of(4), is_alone)
            batch = next(made.batches(0))
            report = slamb_jax.wire_report(made.step.lower(made.start(0.1, 0), batch))
            sent = report.bytes_sent() + report.bytes_sent(conditional=True)
            assert (sent == 0) == is_alone


def test_what_is_missing_or_impossible_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "no ip" in str(namespaces.missing())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.missing() == "root"
    with pytest.raises(SystemExit, match=r"iproute2; missing: root\."):
        benchmark.main(benchmark.Config(out=tmp_path))
    impossible = {"rates": (200.0, 0.0), "workers": 201}
    for name, value in impossible.items():
        with pytest.raises(SystemExit, match=f"--{name}"):
            benchmark.main(benchmark.Config(**{name: value}))


def test_a_worker_that_ends_or_is_silent_ends_the_run():
    fine, silent = "print('report {}'); input()", "input()"
    broken = "print('the reason'); raise SystemExit(3)"
    for other, seconds, told in (
        (broken, 60, r"worker 1 ended \(3\)(.|\n)*the reason"),
        (silent, 3, r"workers \[.*1\] were silent for 3 s"),
    ):
        both = [[sys.executable, "-uc", code] for code in (fine, other)]
        with workers(both) as running, pytest.raises(RuntimeError, match=told):
            running.reports(seconds)
    assert [p.poll() for p in running.processes] == [-signal.SIGKILL] * 2


@shaped
@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion")  # the page compiles optax's own
def test_a_shaped_run_counts_what_the_compiler_says(tmp_path):
    run = programs.start(*COMMAND, "--rates", "500", "--out", tmp_path)
    try:
        _, told = run.communicate(timeout=900)
    finally:
        run.terminate()  # it then removes its hosts
    assert run.returncode == 0, told
    assert left_of(f"slamb-{run.pid}-") == []
    config, results = benchmark.Config(), Results(tmp_path / "steps.jsonl")
    for name in model.METHODS:
        r = benchmark.cells(config.setting, name, 500, results)
        assert float(r["counters /"]) == pytest.approx(1, abs=0.03)
        assert float(r["advised /"]) == pytest.approx(1, abs=0.01)
        assert 4 < float(r["headers"].removesuffix("%")) < 8
        link = 8 * float(r["wire report"]) / 500  # ms
        assert float(r["ms a step"]) > 0.9 * link  # as slow as the links were made


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def has_ended(pid):
    """Also one that waits for its parent's call has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


@shaped
@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["hosts are made", "workers train"])
def test_an_interrupted_run_leaves_nothing(number, moment):
    # A shell's background jobs inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = programs.start(*COMMAND, "--rates", "100")
    name = f"slamb-{run.pid}-"
    try:
        assert programs.wait_until(lambda: left_of(name))
        if moment == "workers train":
            made = lambda: len(children(run.pid)) == 4 and len(left_of(name)) == 9  # noqa: E731
            assert programs.wait_until(made)
            time.sleep(5)
        ours = children(run.pid)
        run.send_signal(number)
        _, told = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode != 0, told
    assert left_of(name) == []
    # An `ip` that was just started when the signal came ends by itself.
    assert programs.wait_until(lambda: all(map(has_ended, ours)), seconds=60)
