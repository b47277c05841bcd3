"""Time to loss: runs that resume, paces, what is advised, and delays of packets."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

import slamb_jax

pytest.importorskip("sklearn")

from benchmarks.frontier.grid import SEEDS, Setting
from benchmarks.frontier.kinds import nesterov
from benchmarks.frontier.methods import METHODS
from benchmarks.frontier.results import Results
from benchmarks.frontier.run import Run
from benchmarks.frontier.tasks import task
from benchmarks.network import delay, losses, namespaces, time_page, time_to_loss
from benchmarks.network.counters import HEADERS, SHARE
from benchmarks.network.learner import BUCKETS, WARM, Ask, program
from benchmarks.network.losses import DENSE, EXCHANGES, exchange_of
from benchmarks.network.timings import (
    HIDDEN,
    Link,
    Pace,
    key,
    pace,
    result,
)
from benchmarks.rivals import elements
from tests import programs
from tests.workers import mesh_of

CONFIG = time_to_loss.Config(task="digits", steps=200, rates=(50.0,), round_trips=(1,))
SETTING, (LINK,) = CONFIG.setting, CONFIG.links
RECORDED = programs.ROOT / time_to_loss.RESULTS
pytestmark = pytest.mark.usefixtures("standard_promotion")


def loss_of(run: Run, step: int) -> float:
    """Falls as 1 / steps; dense is twice as fast as others, "largest of 31" never.

    "adamw, H 1" is as fast where its schedule is three times as long as dense.
    """
    above = abs(math.log(run.rate / METHODS[run.method].rate))
    if run.method == "adamw, largest of 31":
        return 3.0 + above
    long = run.method == "adamw, H 1" and run.setting.steps == 600
    return (50 if long or run.method == DENSE else 100) / step + above


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """All runs on simulated workers."""
    found = Results(tmp_path / "r.jsonl")
    for run in losses.absent(SETTING, found):
        steps = range(run.setting.steps // 4, run.setting.steps + 1, 25)
        points = [{"step": t, "loss": loss_of(run, t), "exchanges": []} for t in steps]
        found.add({"key": run.key(), "points": points})
    return found


def add_steps(results: Results, method: str, link: Link | None) -> None:
    """Steps as the advisor has them: 20 ms alone, and 1 ms for the last message."""
    ask = next(a for k, a, _ in time_to_loss.wanted(CONFIG, results)
               if k == key("steps", SETTING, method, link))  # fmt: skip
    d, every = elements(jax.eval_shape(task("digits").init, jax.random.key(0))), 1
    sent, late = 2 * 0.75 * 2 * d, 1e-3  # bfloat16, on a ring of 4
    if method in EXCHANGES:
        every = exchange_of(method).sync_every or 1
        sent *= 2 * exchange_of(method).share({"w": jax.ShapeDtypeStruct((d,), "f4")})
        sent *= every
    if link is None:
        sent = late = 0.0
    exchange = 8 * sent / (50e6 * SHARE) + late
    times = range(WARM + 1, ask.steps + 1)
    each = {
        "compile_seconds": 9.0,
        "seconds": [0.02 + exchange * (t % every == 0) for t in times],
        "losses": [],
        "sent": {
            "interface_bytes": sent * sum(t % every == 0 for t in times) + HEADERS,
            "interface_packets": 1, "queue_bytes": 0, "queue_packets": 0, "dropped": 0,
        },
        "barrier": 3e-3,  # of six messages, each a half of what the advisor is given
    }  # fmt: skip
    results.add(result(key("steps", SETTING, method, link), ask, [each] * 4))


def test_a_loss_is_reached_on_the_line_between_two_evaluations() -> None:
    curve = [(10, 4.0), (20, 2.0), (30, 1.0)]
    assert losses.steps_to(curve, 2.5) == 17.5
    assert losses.steps_to(curve, 5.0) == 10
    assert losses.steps_to(curve, 0.5) is None
    runs = [{"points": [{"step": 5, "loss": x}, {"step": 9, "loss": y}]}
            for x, y in ((2.0, 1.0), (4.0, None))]  # fmt: skip
    assert losses.curve(runs) == [(5, 3.0)]


def test_the_schedule_that_reaches_dense_soonest_counts(results: Results) -> None:
    assert losses.target(SETTING, results) == pytest.approx(0.25)
    for method in losses.METHODS:
        found = losses.best(SETTING, method, results)
        steps = {run["key"]["steps"] for run in found}
        never = method == "adamw, largest of 31"
        want = {DENSE: 200, "adamw, H 1": 600}.get(method, 800 if never else 400)
        assert steps == {want}
        assert len(found) == (1 if never else len(SEEDS))
        assert {run["key"]["rate"] for run in found} == {METHODS[method].rate}
    again = Results(results.path)  # read back: nothing is missing
    assert list(losses.absent(SETTING, again)) == []


def test_a_page_has_what_is_advised_beside_what_was_measured(results: Results) -> None:
    wanted = [k for k, _, _ in time_to_loss.wanted(CONFIG, results)]
    for found in wanted:
        if found["kind"] == "steps":
            link = LINK if found["mbit"] else None
            add_steps(results, found["method"], link)
    left = [k["kind"] for k, _, _ in time_to_loss.wanted(CONFIG, results)]
    assert left == ["training"] * len(losses.METHODS)
    rows = {r["method"]: r for r in time_page.link_table(SETTING, LINK, results)}
    assert rows[DENSE]["times as fast"] == rows[BUCKETS]["times as fast"] == "1.00"
    assert (rows[DENSE]["of bfloat16"], rows[DENSE]["of float32"]) == ("1.000", "0.500")
    assert int(rows[HIDDEN]["ms a step"]) == int(rows[DENSE]["ms a step"]) - 20
    local = pace(SETTING, "DiLoCo, H 30, outer 0.7 0.5", LINK, results)
    assert local is not None
    assert local.exchanges(89) == 2
    assert local.seconds(89) == pytest.approx(87 * 0.02 + 2 * local.exchange, abs=1e-3)
    off = rows["DiLoCo, H 30, outer 0.7 0.5"]["off"]
    assert abs(int(off.removesuffix(" %"))) <= 3  # 13 exchanges of 400 / 30
    assert rows["adamw, largest of 31"]["seconds"] == "-"
    path = time_page.write_page(SETTING, [LINK], LINK, results)
    assert path.read_text().count("| 50 Mbit/s, 1 ms | ") == 2
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_what_is_advised_of_is_what_was_trained() -> None:
    for name in EXCHANGES:
        exchange, recorded = exchange_of(name), METHODS[name].key
        assert recorded["average_payload"] == exchange.payload
        assert recorded["sync_every"] == exchange.sync_every
        assert (exchange.outer is None) == ("outer" not in recorded)
        if exchange.outer is not None:
            both = exchange.outer, nesterov(recorded["outer"])
            first, second = (tx.update(0.1, tx.init(0.1))[0] for tx in both)
            assert first == second


@pytest.mark.filterwarnings("ignore:step changes most of the state")
@pytest.mark.parametrize("name", [BUCKETS, "adamw, largest of 7"])
def test_a_step_with_nothing_sent_sends_nothing(name: str) -> None:
    for is_alone in (True, False):
        made, _ = program(SETTING, name, mesh_of(4), is_alone)
        batch = next(made.batches(0))
        report = slamb_jax.wire_report(made.step.lower(made.start(0.1, 0), batch))
        assert (report.bytes_sent() == 0) == is_alone


def test_packets_go_to_the_host_that_they_name() -> None:
    class Port(list[bytes]):
        send = list.append

    ports: list[Any] = [Port() for _ in range(3)]
    head = bytes(delay.VNET_BYTES)
    to_one = head + bytes([2, 0, 0, 0, 0, 1]) + b"data"
    to_all = head + b"\xff" * 6 + b"who has 10.0.0.3?"
    delay.forward(to_one, 0, ports)
    delay.forward(to_all, 1, ports)
    assert ports == [[to_all], [to_one], [to_all]]


def test_an_ask_is_a_line() -> None:
    ask = Ask(Setting("digits", 4, 4, 50), DENSE, 0.1, 0, 50, due=(25, 50))
    again = Ask.of_line(json.dumps(dataclasses.asdict(ask)))
    assert dataclasses.replace(again, due=tuple(again.due)) == ask


@pytest.mark.skipif(not RECORDED.exists(), reason="nothing is recorded")
def test_the_recorded_page_is_that_of_the_recorded_data(tmp_path: Path) -> None:
    config = time_to_loss.Config()
    path = tmp_path / RECORDED.name
    path.write_text(RECORDED.read_text())
    page = time_page.write_page(
        config.setting, config.links, config.checked, Results(path)
    )
    assert page.read_text() == RECORDED.with_suffix(".md").read_text()


@pytest.mark.skipif(namespaces.missing() is not None, reason="needs namespaces")
@pytest.mark.long
def test_a_run_on_links_is_as_late_as_they_are(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_to_loss, "TIMED", (DENSE,))
    monkeypatch.setattr(losses, "METHODS", (DENSE,))
    config = dataclasses.replace(CONFIG, steps=200, round_trips=(40.0,))
    monkeypatch.setattr(time_to_loss, "best_rate", lambda *_: None)
    time_to_loss.on_links(config, results, time_to_loss.Console())
    found = pace(SETTING, DENSE, config.links[0], results)
    assert isinstance(found, Pace)
    d = elements(jax.eval_shape(task("digits").init, jax.random.key(0)))
    assert found.sent == pytest.approx(3 * d, rel=0.03)
    assert found.message > 0.02
    assert found.exchange > 6 * 0.02
