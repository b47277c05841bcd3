"""Time to loss: runs that resume, paces, what is advised, and delays of packets."""

import dataclasses
import functools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

pytest.importorskip("sklearn")

from benchmarks.network import (
    delay,
    losses,
    namespaces,
    time_page,
    time_to_loss,
    timings,
)
from benchmarks.network.counters import HEADERS, SHARE, Counters
from benchmarks.network.losses import DENSE, EXCHANGES, exchange_of
from benchmarks.network.processes import workers
from benchmarks.network.worker import WARM, Ask
from benchmarks.train.grids import METHODS
from benchmarks.train.results import Results
from benchmarks.train.tasks import parameters
from benchmarks.train.trials import SEEDS
from tests import programs

CONFIG = time_to_loss.Config(task="digits", steps=200, rates=(50.0,), round_trips=(1,))
SETTING, (LINK,) = CONFIG.setting, CONFIG.links
OURS, LOCAL = "adamw, H 1", "DiLoCo, H 30, outer 0.7 0.5"
NEVER = "adamw, largest of 31"
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


def add_steps(results, key, ask):
    """Steps as the advisor has them: 20 ms of hosts, and 1 ms for the last message."""
    d, every, method = parameters("digits"), 1, key["method"]
    sent, late = 2 * 0.75 * 2 * d, 1e-3  # bfloat16, on a ring of 4
    if method in EXCHANGES:
        every = exchange_of(method).sync_every or 1
        sent *= 2 * exchange_of(method).share({"w": jax.ShapeDtypeStruct((d,), "f4")})
        sent *= every * (2 if exchange_of(method).route == "all" else 1)
    exchange = 8 * sent / (50e6 * SHARE) + late
    if key["mbit"] == timings.FREE.mbit:
        exchange = 0.0
    sends = [t % every == 0 for t in range(WARM + 1, WARM + ask.steps + 1)]
    counted = {"bytes": sent * sum(sends) + HEADERS, "packets": 1}
    each = {"compile_seconds": 9.0, "loss": None, "sent": counted}
    each["seconds"] = [0.02 + exchange * does for does in sends]
    each["seconds"][0] += 90.0  # of which a median knows nothing
    each["barrier"] = 3e-3  # of six messages, each a half of what the advisor is given
    results.add(timings.result(key, ask, [each] * 4) | {"reported": 2 * sent})


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


def test_a_page_has_what_is_advised_beside_what_was_measured(results):
    for key, ask, _ in list(time_to_loss.wanted(CONFIG, results)):
        if key["kind"] == "steps":
            add_steps(results, key, ask)
    left = [k["kind"] for k, _, _ in time_to_loss.wanted(CONFIG, results)]
    assert left == ["training"] * len(losses.TO_THE_END)
    rows = {r["method"]: r for r in time_page.link_table(SETTING, LINK, results)}
    dense, hidden = rows[DENSE], rows[losses.HIDDEN]
    assert dense["times as fast"] == "1.00"
    assert (dense["of bfloat16"], dense["sent / reported"]) == ("1.000", "0.500")
    assert int(hidden["ms a step"]) == int(dense["ms a step"]) - 20
    local = timings.pace(SETTING, LOCAL, LINK, results)
    assert local.exchanges(89) == 2
    assert local.seconds(89) == pytest.approx(87 * 0.02 + 2 * local.exchange, abs=1e-3)
    off = int(rows[LOCAL]["off"].removesuffix(" %"))
    assert abs(off) <= 3  # 13 exchanges of 400 / 30
    assert rows[NEVER]["seconds"] == "-"
    path = time_page.write_page(SETTING, [LINK], LINK, results)
    assert path.read_text().count("| 50 Mbit/s, 1 ms | ") == 2
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_what_is_advised_of_is_what_was_trained():
    for name in EXCHANGES:
        exchange, every = exchange_of(name), re.search(r"H (\d+)", name)
        assert exchange is METHODS[name].exchange
        assert exchange.sync_every == (int(every[1]) if every else 1)
        assert (exchange.outer is None) == ("outer" not in name)


def test_packets_go_to_the_host_that_they_name():
    class Port(list):
        send = list.append

    ports = [Port() for _ in range(3)]
    head = bytes(delay.VNET_BYTES)
    to_one = head + bytes([2, 0, 0, 0, 0, 1]) + b"data"
    to_all = head + b"\xff" * 6 + b"who has 10.0.0.3?"
    delay.forward(to_one, 0, ports)
    delay.forward(to_all, 1, ports)
    assert ports == [[to_all], [to_one], [to_all]]


def test_an_ask_is_a_line():
    ask = Ask(SETTING, DENSE, 0.1, 0, 50, is_training=True)
    assert Ask.of_line(json.dumps(dataclasses.asdict(ask))) == ask


def test_the_recorded_page_is_that_of_the_recorded_data(tmp_path):
    config, recorded = time_to_loss.Config(), programs.ROOT / time_to_loss.RESULTS
    path = tmp_path / recorded.name
    path.write_text(recorded.read_text())
    measured = config.setting, config.links, config.checked, Results(path)
    page = time_page.write_page(*measured)
    assert page.read_text() == recorded.with_suffix(".md").read_text()


def test_headers_are_taken_off():
    sent = Counters(3 * 1514 + 66, 4)  # and an acknowledgement
    joined = Counters(3 * 1448 + 66, 1)  # as one packet, cut later
    assert sent.data_bytes == joined.data_bytes == 3 * 1448 == 3 * SHARE * 1514


def test_what_is_missing_or_impossible_is_said(monkeypatch, results):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert "no ip" in str(namespaces.missing())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert namespaces.missing() == "root"
    config = dataclasses.replace(CONFIG, out=results.path.parent)
    with pytest.raises(SystemExit, match=r"iproute2; missing: root\."):
        time_to_loss.main(config)
    impossible = {"rates": (200.0, 0.0), "workers": 201}
    for name, value in impossible.items():
        with pytest.raises(SystemExit, match=f"--{name}"):
            time_to_loss.main(time_to_loss.Config(**{name: value}))


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
def test_steps_on_links_are_as_late_as_they_are_and_send_what_is_reported(
    tmp_path, monkeypatch
):
    methods = DENSE, OURS, "adamw, outer, H 10, outer 1 0.5"
    monkeypatch.setattr(time_to_loss, "TIMED", methods)
    monkeypatch.setattr(losses, "TO_THE_END", ())
    config = time_to_loss.Config(rates=(200.0,), round_trips=(40.0,))
    results = Results(tmp_path / "steps.jsonl")
    wanted = functools.partial(time_to_loss.wanted, config, results)
    timings.on_links(config.workers, wanted, results, time_to_loss.Console())
    for method, messages in zip(methods, (6, 2, 0.2), strict=True):
        found = timings.pace(config.setting, method, config.links[0], results)
        assert found.sent == pytest.approx(found.reported, rel=0.03)
        assert found.message > 0.02
        carried = 8 * found.sent / found.every / 200e6
        assert found.step > max(messages * 0.02, 0.9 * carried)


def left_of(name):
    """Namespaces and hosts files whose names begin so."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    found = [x for x in listed.stdout.split() if x.startswith(name)]
    return found + [str(x) for x in namespaces.HOSTS_FILES.glob(f"{name}*")]


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
def test_an_interrupted_run_leaves_nothing(number, moment, results):
    # A shell's background jobs inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = ("--task", "digits", "--steps", "200", "--out", results.path.parent)
    run = programs.start("-m", "benchmarks.network.time_to_loss", *words)
    name = f"slamb-{run.pid}-"
    try:
        assert programs.wait_until(lambda: left_of(name))
        if moment == "workers train":  # beside the process that delays
            made = lambda: len(children(run.pid)) == 5 and len(left_of(name)) == 9  # noqa: E731
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
