"""The command, as a user types it; bad input is in ``wrong_uses/commands.py``."""

import json
import re

import jax.numpy as jnp
import pytest

import slamb_jax
from slamb_jax import command_line
from slamb_jax.advisor import advice
from tests import programs
from tests.workers import AXIS, stack, stepper

ASKED = {
    "--params": "340M", "--workers": "128", "--link": "10Gbit", "--step": "0.5s",
    "--dense-update": "10ms", "--exchanging-update": "12ms",
}  # fmt: skip


def advise(capsys, *options, **changed):
    asked = ASKED | {f"--{name}": value for name, value in changed.items()}
    words = [w for k, v in asked.items() if v is not None for w in (k, v)]
    command_line.main(["advise", *words, *options])
    return capsys.readouterr().out


def said(*given, **changed):
    """What the command prints, as one line."""
    return " ".join(advise(*given, **changed).split())


def test_a_readable_table(capsys):
    out = advise(capsys)
    assert out.startswith("340 M parameters; 128 workers, 1 per node; 10 Gbit/s, ")
    share = "5.16% of the bytes of dense float32, 10.3% of bfloat16"
    assert f"Exchange('data'): {share}" in said(capsys)
    row = r"^exchanging +\d+.\d +500 ms +\d+ ms +0 ns +12 ms +\d+ ms +4.\d\d +2.\d\d$"
    assert re.search(row, out, re.M), out
    assert "may pay: " in out
    lines = out.splitlines() + advise(capsys, "--overlap").splitlines()
    assert max(map(len, lines)) <= 88
    assert "will not pay: " in advise(capsys, step="20s", link="400Gbit")
    free = {"dense-update": None, "exchanging-update": None}
    assert "Both updates are taken to be free" not in said(capsys)
    assert "free: python -m benchmarks.step" in said(capsys, **free)


def test_a_budget_chooses_the_exchange_and_says_what_to_expect(capsys):
    out = said(capsys, "--budget", "5%", "--axis-name", "x")
    assert "Exchange('x', payload='largest_of_7'): " in out
    assert "may not pay: " in out
    assert "No loss is forecast for 340 M parameters" in out
    assert "In largest_of_7 the loss differed from dense AdamW's" in out
    out = said(capsys, "--budget", "5%", params="100k")
    assert "No loss is forecast" not in out
    assert "as many steps by +6.7 % (+5.0 to +8.3 %, 95 %), on small" in out


def test_workers_that_share_a_link_are_told_of_groups(capsys):
    shared = said(capsys, "--workers-per-node", "8")
    assert "--local-axis-name device" in shared
    grouped = said(capsys, "--workers-per-node", "8", "--local-axis-name", "device")
    assert "One worker per node" not in grouped + advise(capsys)
    figures = r"(\d\.\d\d) times as fast as (a dense one in float32|one in bfloat16)"
    both = re.findall(figures, shared.partition("One worker per node")[2])
    assert both == re.findall(figures, grouped)
    numbers = json.loads(advise(capsys, "--workers-per-node", "8", "--json"))
    speedups = [numbers["per_node"][x] for x in ("speedup", "speedup_bfloat16")]
    assert [f"{x:.2f}" for x in speedups] == [x for x, _ in both]


def test_numbers_as_json(capsys):
    numbers = json.loads(advise(capsys, "--json", "--budget", "2%"))
    exchange = slamb_jax.Exchange.from_json(numbers["exchange"])
    assert exchange == slamb_jax.Exchange("data", payload="largest_of_7")
    network = slamb_jax.Network(128, 10e9)
    want = slamb_jax.advise(340e6, network, exchange, step_seconds=0.5)
    assert numbers["speedup"] == pytest.approx(want.speedup, rel=0.1)
    assert numbers["faster"] is True
    assert numbers["break_even_link"] is None  # no link is too fast
    assert numbers["share"] == pytest.approx(0.0184, abs=5e-5)
    assert numbers["pays"] is False  # at a higher loss
    assert (numbers["payload"], numbers["expected_loss"]) == ("largest_of_7", None)
    assert numbers["recorded"]["above"] == 6.7


def test_options_override_a_file_as_settings_of_an_exchange(capsys, tmp_path):
    """What a run recorded, and every option beside it, make one Exchange."""
    recorded = slamb_jax.Exchange.paper("rows", overlap=True)
    path = tmp_path / "exchange.json"
    path.write_text('{"payload": "uniform8"}')
    told = said(capsys, "--exchange", str(path))
    assert "Exchange('data', payload='uniform8')" in told
    path.write_text(json.dumps(recorded.to_json()))
    told = said(capsys, "--exchange", str(path))
    assert f"{recorded!r}: 11% of the bytes" in told
    words = "--local-axis-name=x --sync-every=never --no-overlap --payload null"
    more = [*words.split(), "--workers-per-node", "4"]
    out = advise(capsys, "--exchange", str(path), *more)
    network = slamb_jax.Network(128, 10e9, workers_per_node=4)
    options = {"local_axis_name": "x", "sync_every": None}
    exchange = slamb_jax.Exchange.paper("rows", **options)
    seconds = {"step_seconds": 0.5, "update_seconds": (0.010, 0.012)}
    assert out == f"{slamb_jax.advise(340e6, network, exchange, **seconds)}\n"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("advise --help", "--latency 20us        of one message, with Gloo"),
        ("advise --help", f"default: {slamb_jax.Exchange().sync_every}, the momentum"),
        ("advise --help", f"float32; default: {slamb_jax.Exchange().payload}\n"),
        ("--version", f"slamb-jax {slamb_jax.__version__}\n"),
    ],
)
def test_help_shows_defaults(words, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        command_line.main(words.split())
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


def test_the_command_as_a_process():
    words = [word for pair in (ASKED | {"--workers": "0"}).items() for word in pair]
    run = programs.start("-m", "slamb_jax.command_line", "advise", *words)
    error = "slamb-jax advise: workers must be an integer of at least 2, got 0\n"
    assert programs.finish(run) == (2, error)


READ = [
    ("count", "340M", 340e6), ("count", "2.8B", 2.8e9), ("count", "110e6", 110e6),
    ("count", "1 k", 1e3), ("rate", "10Gbit", 10e9), ("rate", "200Mbit", 200e6),
    ("rate", "25Gbit/s", 25e9), ("rate", "25GB/s", 200e9), ("rate", ".5Tbps", 5e11),
    ("duration", "0.5s", 0.5), ("duration", "300ms", 0.3), ("duration", "50us", 50e-6),
    ("share", "5%", 0.05), ("share", "0.05", 0.05), ("share", "1", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "value"), READ)
def test_units_are_read(kind, text, value):
    assert getattr(command_line, f"parse_{kind}")(text) == pytest.approx(value)


def test_units_are_printed():
    printed = [advice.scaled(999.9e6, "bit/s"), advice.scaled(2.8e9, "parameters")]
    printed += [advice.duration(x) for x in (0.9999, 3.2e-8, 0.0)]
    assert printed == ["1 Gbit/s", "2.8 G parameters", "1 s", "32 ns", "0 ns"]


def test_a_report_of_the_text_of_a_program(capsys, tmp_path):
    params = {"w": jnp.ones((32, 32))}
    tx = slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS))
    trees = stack((params, tx.init(params), params), 4)
    lowered = stepper(tx, "shard_map", 4).lower(*trees)
    path = tmp_path / "program.txt"
    path.write_text(lowered.compile().as_text())
    command_line.main(["report", str(path)])
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:3] == ["kind", "dtype", "elements"]
    command_line.main(["report", str(path), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [x["kind"] for x in rows] == [y.split()[0] for y in table.splitlines()[1:]]
    assert {x["kind"] for x in rows} == {"all-to-all", "all-gather"}
    want = slamb_jax.wire_report(lowered).bytes_sent()
    assert sum(x["bytes_sent"] for x in rows) == want
