"""The command, as a user types it; bad input is in ``wrong_uses/commands.py``."""

import re

import pytest

import slamb_jax
from slamb_jax import command_line
from slamb_jax.advisor.units import COUNTS, RATES, TIMES, scaled
from tests import programs

ASKED = ["advise", "--params=340M", "--workers=128", "--link=10Gbit", "--step=0.5s"]


def advise(capsys, *options):
    command_line.main([*ASKED, *options])
    return capsys.readouterr().out


def test_a_readable_table(capsys):
    out = advise(capsys)
    assert out.startswith("340 M parameters; 128 workers, 1 per node; 10 Gbit/s, ")
    share = "5.16% of the bytes of dense float32, 10.3% of bfloat16"
    assert f"\nExchange('data'): {share}\n" in out
    row = r"^exchanging +\d+.\d +500 ms +\d+ ms +0 ns +\d+ ms +3.\d\d +2.\d\d$"
    assert re.search(row, out, re.M), out
    assert max(map(len, out.splitlines())) <= 88
    assert "free: python -m benchmarks.step" in " ".join(out.split())


def test_options_are_settings_of_the_exchange_and_of_the_network(capsys):
    words = "--local-axis-name=x --payload null --workers-per-node 4"
    out = advise(capsys, *words.split(), "--local-link", "200Gbit", "--latency=1ms")
    nodes = {"workers_per_node": 4, "local_link": 200e9, "latency": 1e-3}
    network = slamb_jax.Network(128, 10e9, **nodes)
    exchange = slamb_jax.Exchange("data", local_axis_name="x", payload=None)
    assert out == f"{slamb_jax.advise(340e6, network, exchange, step_seconds=0.5)}\n"
    for option in ("--budget=5%", "--payload=largest_of_7"):
        assert "Exchange('data', payload='largest_of_7'): " in advise(capsys, option)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("advise --help", f"float32; default: {slamb_jax.Exchange().payload}\n"),
        ("--version", f"slamb-jax {slamb_jax.__version__}\n"),
    ],
)
def test_help_and_version(words, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        command_line.main(words.split())
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out


def test_the_command_as_a_process():
    run = programs.start("-m", "slamb_jax.command_line", *ASKED, "--workers=0")
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
    printed = [scaled(999.9e6, RATES), scaled(2.8e9, COUNTS), scaled(7, COUNTS)]
    printed += [scaled(x, TIMES) for x in (0.9999, 3.2e-8, 0.0)]
    assert printed == ["1 Gbit/s", "2.8 G", "7", "1 s", "32 ns", "0 ns"]
