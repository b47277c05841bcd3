"""Time to loss: runs that resume, delays of packets, and the recorded page."""

import dataclasses
import functools
import math
import re

import pytest

pytest.importorskip("sklearn")

from benchmarks.network import losses, namespaces, time_page, time_to_loss, timings
from benchmarks.network.delay import VNET_BYTES, forward
from benchmarks.network.losses import DENSE, EXCHANGES, exchange_of
from benchmarks.train.grids import METHODS
from benchmarks.train.results import Results
from benchmarks.train.tasks import parameters
from benchmarks.train.trials import SEEDS
from tests import programs

CONFIG = time_to_loss.Config(task="digits", steps=200, rates=(50.0,), round_trips=(1,))
SETTING = CONFIG.setting
OURS, NEVER = "adamw, H 1", "adamw, largest of 31"
pytestmark = pytest.mark.usefixtures("standard_promotion")


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
    found = Results(tmp_path / "r.jsonl")
    for run in losses.absent(SETTING, found):
        steps = range(run.setting.steps // 4, run.setting.steps + 1, 25)
        points = [{"step": t, "loss": loss_of(run, t)} for t in steps]
        found.add({"key": run.key(), "points": points})
    return found


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
    head = bytes(VNET_BYTES)
    to_one = head + bytes([2, 0, 0, 0, 0, 1]) + b"data"
    to_all = head + b"\xff" * 6 + b"who has 10.0.0.3?"
    forward(to_one, 0, ports)
    forward(to_all, 1, ports)
    assert ports == [[to_all], [to_one], [to_all]]


def test_the_recorded_page_is_that_of_the_recorded_data(tmp_path):
    config, recorded = time_to_loss.Config(), programs.ROOT / time_to_loss.RESULTS
    path = tmp_path / recorded.name
    path.write_text(recorded.read_text())
    measured = config.setting, config.links, config.checked, Results(path)
    page = time_page.write_page(*measured)
    assert page.read_text() == recorded.with_suffix(".md").read_text()


@pytest.mark.skipif(namespaces.missing() is not None, reason="needs namespaces")
@pytest.mark.long
def test_a_run_on_links_is_as_late_as_they_are(results, monkeypatch):
    monkeypatch.setattr(time_to_loss, "TIMED", (DENSE,))
    monkeypatch.setattr(losses, "METHODS", (DENSE,))
    config = dataclasses.replace(CONFIG, steps=200, round_trips=(40.0,))
    monkeypatch.setattr(time_to_loss, "best_rate", lambda *_: None)
    wanted = functools.partial(time_to_loss.wanted, config, results)
    console = time_to_loss.Console()
    timings.on_links(config.workers, wanted, results, console, delays=True)
    found = timings.pace(SETTING, DENSE, config.links[0], results)
    assert found.sent == pytest.approx(3 * parameters("digits"), rel=0.03)
    assert found.message > 0.02
    assert found.exchange > 6 * 0.02
