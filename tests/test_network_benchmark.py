"""Benchmark on slow links: its arithmetic and processes; it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from benchmarks.network import model, namespaces, results
from benchmarks.network.__main__ import Config, check
from benchmarks.network.counters import SHARE, Counters
from benchmarks.network.processes import workers
from benchmarks.network.report import write
from benchmarks.network.worker import Contestant
from benchmarks.rivals import elements
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


def report(*seconds):
    sent = dict.fromkeys(("interface_packets", "queue_packets"), 10)
    sent |= dict.fromkeys(("interface_bytes", "queue_bytes"), 10 * 1514)
    block = {"seconds": list(seconds), "sent": sent | {"dropped": 0}}
    names = [f"{name}{alone}" for name in results.ADVISED for alone in ("", ", alone")]
    return {"blocks": dict.fromkeys(names, block), "barriers": [0.006, 0.006]}


def test_a_step_ends_with_the_last_worker_and_counts_its_cycle(tmp_path):
    cycles = [[report(1.0, 3.0), report(2.0, 2.0)]] * 2
    cycles += [[report(90.0, 90.0), report(1.0, 1.0)]]  # disturbed
    wires = {
        name: {"every_step": 1e6, "at_average": 5e6 * name.startswith("SLAMB")}
        for name in results.ADVISED
    }
    exchange = Config(sync_every=10).exchange
    rows = results.rows(200.0, cycles, wires, exchange)
    assert [r.step_seconds for r in rows] == [2.5] * 4
    assert [r.wire_bytes for r in rows] == [1e6, 1e6, 1.5e6, 1.5e6]
    assert {r.data_bytes for r in rows} == {5 * 1448}
    assert {r.latency for r in rows} == {0.003}  # two messages between two workers
    ring = 2 * 1 / 2 * 4 * elements(jax.eval_shape(model.init, jax.random.key(0)))
    predicted = 2.5 + 8 * ring / (200e6 * SHARE) + 0.003  # the last message
    assert rows[0].predicted_seconds == pytest.approx(predicted)
    assert rows[0].link_seconds == pytest.approx(8e6 / 200e6)
    dense, *_ = results.rows(None, cycles, wires, exchange)
    assert dense.data_bytes == 5 * 1448 / 2  # both workers see the one interface
    assert dense.predicted_seconds is None
    data, picture = write(rows, {"seed": 0}, tmp_path)
    assert [r["mbit"] for r in json.loads(data.read_text())["rows"]] == [200.0] * 4
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("name", results.ADVISED)
def test_a_step_alone_sends_nothing(name, monkeypatch):
    monkeypatch.setattr(model, "ROWS", 64)
    method = model.methods(Config(sync_every=3).exchange)[name]
    with standard_promotion():  # optax.lamb needs it
        both = (model.alone(method), method)
        alone, sending = (Contestant(x, mesh_of(4), 0).wire() for x in both)
    assert (alone["every_step"], alone["at_average"]) == (0, 0)
    assert sending["every_step"] > 1e5


def test_what_is_missing_or_impossible_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "no ip" in str(namespaces.missing())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.missing() == "root"
    with pytest.raises(SystemExit, match=r"missing here: root\. With --loopback"):
        check(Config())
    check(Config(loopback=True))
    impossible = {"rates": (200.0, 0.0), "rounds": 0, "workers": 201, "sync_every": 0}
    for name, value in impossible.items():
        with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')}"):
            check(Config(**{name: value}, loopback=True))


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
def test_a_shaped_run_counts_what_the_compiler_says(tmp_path):
    run = programs.start(*COMMAND, "--rates", "500", "--rounds", "1", "--out", tmp_path)
    try:
        _, told = run.communicate(timeout=280)
    finally:
        run.terminate()  # it then removes its hosts
    assert run.returncode == 0, told
    assert left_of(f"slamb-{run.pid}-") == []
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [r["optimizer"] for r in rows] == list(results.ADVISED)
    for r in rows:
        assert r["data_bytes"] == pytest.approx(r["wire_bytes"], rel=0.03)
        assert r["advised_bytes"] == pytest.approx(r["wire_bytes"], rel=0.01)
        assert 0.04 < r["header_share"] < 0.08
        link = 8 * r["wire_bytes"] / 500e6
        assert r["step_seconds"] > 0.9 * link  # the links are as slow as they were made


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
