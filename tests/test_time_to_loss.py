"""Time to loss: runs that resume, paces, what is advised, and delays of packets."""

import dataclasses
import functools
import json
import math
import re

import jax
import pytest

import slamb_jax

pytest.importorskip("sklearn")

from benchmarks.network import (
    delay,
    losses,
    namespaces,
    time_page,
    time_to_loss,
    timings,
)
from benchmarks.network.counters import HEADERS, SHARE
from benchmarks.network.losses import BUCKETS, DENSE, EXCHANGES, exchange_of
from benchmarks.network.worker import WARM, Ask, program
from benchmarks.train.grids import METHODS
from benchmarks.train.results import Results
from benchmarks.train.tasks import parameters
from benchmarks.train.trials import SEEDS
from tests import programs
from tests.workers import mesh_of

CONFIG = time_to_loss.Config(task="digits", steps=200, rates=(50.0,), round_trips=(1,))
SETTING, (LINK,) = CONFIG.setting, CONFIG.links
OURS, LOCAL = "adamw, H 1", "DiLoCo, H 30, outer 0.7 0.5"
NEVER = "adamw, largest of 31"
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


def add_steps(results, key, ask):
    """Steps as the advisor has them: 20 ms alone, and 1 ms for the last message."""
    d, every, method = parameters("digits"), 1, key["method"]
    sent, late = 2 * 0.75 * 2 * d, 1e-3  # bfloat16, on a ring of 4
    if method in EXCHANGES:
        every = exchange_of(method).sync_every or 1
        sent *= 2 * exchange_of(method).share({"w": jax.ShapeDtypeStruct((d,), "f4")})
        sent *= every
    if not key["mbit"]:
        sent = late = 0.0
    exchange = 8 * sent / (50e6 * SHARE) + late
    sends = [t % every == 0 for t in range(WARM + 1, ask.steps + 1)]
    counted = {"interface_bytes": sent * sum(sends) + HEADERS, "interface_packets": 1}
    counted |= dict.fromkeys(("queue_bytes", "queue_packets", "dropped"), 0)
    each = {"compile_seconds": 9.0, "losses": [], "sent": counted}
    each["seconds"] = [0.02 + exchange * does for does in sends]
    each["barrier"] = 3e-3  # of six messages, each a half of what the advisor is given
    results.add(timings.result(key, ask, [each] * 4))


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
    assert left == ["training"] * len(losses.METHODS)
    rows = {r["method"]: r for r in time_page.link_table(SETTING, LINK, results)}
    dense, hidden = rows[DENSE], rows[timings.HIDDEN]
    assert dense["times as fast"] == rows[BUCKETS]["times as fast"] == "1.00"
    assert (dense["of bfloat16"], dense["of float32"]) == ("1.000", "0.500")
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


@pytest.mark.filterwarnings("ignore:after call")
@pytest.mark.parametrize("name", [BUCKETS, "adamw, largest of 7"])
def test_a_step_with_nothing_sent_sends_nothing(name):
    for is_alone in (True, False):
        made, _ = program(SETTING, name, mesh_of(4), is_alone)
        batch = next(made.batches(0))
        report = slamb_jax.wire_report(made.step.lower(made.start(0.1, 0), batch))
        assert (report.bytes_sent() == 0) == is_alone


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
    ask = Ask(SETTING, DENSE, 0.1, 0, 50, due=(25, 50))
    reread = Ask.of_line(json.dumps(dataclasses.asdict(ask)))
    assert dataclasses.replace(reread, due=tuple(reread.due)) == ask


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
