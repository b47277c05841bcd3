"""The command, as a user types it; bad input is in ``wrong_uses/commands.py``."""

import json
import re

import jax.numpy as jnp
import pytest

import slamb_jax
from slamb_jax import command_line
from slamb_jax.advisor import units
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


def test_a_readable_table(capsys):
    out = advise(capsys)
    assert out.startswith("340 M parameters; 128 workers, 1 per node; 10 Gbit/s, ")
    assert "Exchange('workers'): the momentum at every step" in out
    row = r"^exchanging +\d+.\d +500 ms +\d+ ms +12 ms +\d+ ms +4.\d\d$"
    assert re.search(row, out, re.M), out
    assert "will pay: " in out
    assert max(map(len, out.splitlines())) <= 88
    assert "will not pay: " in advise(capsys, step="20s", link="400Gbit")


def test_a_budget_chooses_the_exchange_and_says_what_to_expect(capsys):
    out = " ".join(advise(capsys, "--budget", "5%", "--min-size", "7").split())
    assert "Exchange('workers', min_size=7, average_payload='largest_of_7'): the" in out
    assert "where AdamW in largest_of_7 ended beside dense AdamW: a loss" in out
    assert "takes 1.84% of the dense bytes, ternary would take 5.16%." in out
    assert "'largest_of_127'" in advise(capsys, "--budget", "0.003")
    out = advise(capsys, "--budget", "6%")
    assert "ternary takes 5.16% of the dense bytes." in out


def test_workers_that_share_a_link_are_told_of_groups(capsys):
    shared = advise(capsys, "--workers-per-node", "8")
    assert "--local-axis-name device" in shared
    grouped = advise(capsys, "--workers-per-node", "8", "--local-axis-name", "device")
    assert "One worker per node" not in grouped + advise(capsys)
    speedup = re.search(r"a speed-up of (\d\.\d\d)\.", shared)[1]
    assert f"{speedup} times as fast as a dense one in float32" in grouped
    found = json.loads(advise(capsys, "--workers-per-node", "8", "--json"))
    assert f"{found['per_node']['speedup']:.2f}" == speedup


def test_a_number_of_steps_may_be_never(capsys):
    out = advise(capsys, "--sync-every", "never", "--compress-ratio", "0.1")
    assert "the parameters never" in " ".join(out.split())


def test_numbers_as_json(capsys):
    found = json.loads(advise(capsys, "--json", "--budget", "2%"))
    exchange = slamb_jax.Exchange.from_json(found["exchange"])
    found_in = exchange.axis_name, exchange.average_payload
    assert found_in == ("workers", "largest_of_7")
    network = slamb_jax.Network(128, 10e9)
    want = slamb_jax.advise(340e6, network, exchange, step_seconds=0.5)
    assert found["speedup"] == pytest.approx(want.speedup, rel=0.1)
    assert found["pays"] is True
    assert found["break_even_link"] is None  # no link is too fast


def test_options_override_a_file_as_settings_of_an_exchange(capsys, tmp_path):
    """What a run recorded, and every option beside it, make one Exchange."""
    recorded = slamb_jax.Exchange("data", compress_ratio=0.25, payload="bfloat16")
    path = tmp_path / "exchange.json"
    path.write_text(json.dumps(recorded.to_json()))
    assert f"{recorded!r}: 0.25 of" in advise(capsys, "--exchange", str(path))
    options = {
        "compress_ratio": {"0": 0.5, "500": 0.2}, "min_size": 100, "sync_every": 50,
        "payload": "uniform8", "average_payload": "bfloat16", "local_axis_name": "x",
        "rolling": False,
    }  # fmt: skip
    words = [f"--{k.replace('_', '-')}" for k in options]
    values = [v if isinstance(v, str) else json.dumps(v) for v in options.values()]
    given = [w for pair in zip(words, values, strict=True) for w in pair]
    out = advise(
        capsys, "--exchange", str(path), *given, "--overlap", "--mu-dtype", "bfloat16",
        "--workers-per-node", "4",
    )  # fmt: skip
    settings = options | {"compress_ratio": {0: 0.5, 500: 0.2}, "overlap": True}
    network = slamb_jax.Network(128, 10e9, workers_per_node=4)
    advice = slamb_jax.advise(
        340e6, network, slamb_jax.Exchange("data", **settings), step_seconds=0.5,
        mu_dtype="bfloat16", update_seconds=(0.010, 0.012),
    )  # fmt: skip
    assert out == f"{advice}\n"
    never = advise(capsys, "--exchange", str(path), "--sync-every", "null")
    assert "the parameters never" in never


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            "advise --help",
            "k, the share of the momentum exchanged per step; default: 0\n",
        ),
        ("advise --help", f"default: {slamb_jax.Exchange().sync_every}\n"),
        ("resize --help", "usage: slamb-jax resize [-h] --workers 8 CHECKPOINT OUT\n"),
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
    asked = ASKED | {"--workers": "0"}
    words = [word for pair in asked.items() for word in pair]
    run = programs.start("-m", "slamb_jax.command_line", "advise", *words)
    _, told = run.communicate(timeout=100)
    said = "slamb-jax advise: workers must be an integer of at least 2, got 0\n"
    assert (run.returncode, told) == (2, said)


READ = [
    (units.parse_count, "340M", 340e6), (units.parse_count, "2.8B", 2.8e9),
    (units.parse_count, "110e6", 110e6), (units.parse_count, "1 k", 1e3),
    (units.parse_rate, "10Gbit", 10e9), (units.parse_rate, "200Mbit", 200e6),
    (units.parse_rate, "25Gbit/s", 25e9), (units.parse_rate, "25GB/s", 200e9),
    (units.parse_rate, ".5Tbps", 5e11), (units.parse_duration, "0.5s", 0.5),
    (units.parse_duration, "300ms", 0.3), (units.parse_duration, "50us", 50e-6),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "value"), READ)
def test_units_are_read(parse, text, value):
    assert parse(text) == pytest.approx(value)


def test_units_are_printed():
    assert units.scaled(999.9e6, "bit/s") == "1 Gbit/s"
    assert units.scaled(2.8e9, "parameters") == "2.8 G parameters"
    assert units.duration(0.9999) == "1 s"
    assert units.duration(3.2e-8) == "32 ns"
    assert units.duration(0.0) == "0 ns"


def test_a_report_of_the_text_of_a_program(capsys, tmp_path):
    params = {"w": jnp.ones((32, 32))}
    tx = slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS))
    lowered = stepper(tx, "shard_map", 4).lower(
        *(stack(x, 4) for x in (params, tx.init(params), params))
    )
    path = tmp_path / "program.txt"
    path.write_text(lowered.compile().as_text())
    command_line.main(["report", str(path)])
    table = capsys.readouterr().out
    assert table.splitlines()[0].split()[:3] == ["kind", "dtype", "elements"]
    command_line.main(["report", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [x["kind"] for x in found] == [y.split()[0] for y in table.splitlines()[1:]]
    assert {x["kind"] for x in found} == {"all-to-all", "all-gather"}
    want = slamb_jax.wire_report(lowered).bytes_sent()
    assert sum(x["bytes_sent"] for x in found) == want
