"""The command, as a user types it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from slamb_jax import _cli, _units

ASKED = {
    "--params": "340M", "--workers": "128", "--link": "10Gbit", "--step": "0.5s",
    "--lamb": "10ms", "--slamb": "12ms",
}  # fmt: skip


def words(**changed):
    options = ASKED | {f"--{k.replace('_', '-')}": v for k, v in changed.items()}
    return ["advise", *(w for k, v in options.items() if v is not None for w in (k, v))]


def test_a_readable_table(capsys):
    _cli.main(words())
    out = capsys.readouterr().out
    assert out.startswith("340 M parameters; 128 workers, 1 a node; 10 Gbit/s, ")
    slamb = re.search(r"^SLAMB +296.9 +500 ms +243 ms +12 ms +755 ms +3.54$", out, re.M)
    assert slamb, out
    assert "will pay: " in out
    assert max(map(len, out.splitlines())) <= 100
    _cli.main(words(step="20s", link="400Gbit"))
    assert "will not pay: " in capsys.readouterr().out


def test_it_measures_where_no_times_are_given(capsys):
    _cli.main(words(params="1M", lamb=None, slamb=None))
    assert "measured now on 'cpu'" in capsys.readouterr().out


IMPOSSIBLE = [
    ({"link": "10"}, "argument --link: must be a rate such as .*, got '10'"),
    ({"link": "fast"}, "argument --link: .*'fast'"),
    ({"params": "0"}, "params must be in .*0"),
    ({"params": "lots"}, "argument --params: .*'lots'"),
    ({"step": "0s"}, "step_seconds must be in .*0"),
    ({"step": "0.5"}, "argument --step: .*'0.5'"),
    ({"step": None}, "required: --step"),
    ({"workers": "1"}, "workers must be an integer of at least 2, got 1"),
    ({"workers": "many"}, "argument --workers: .*'many'"),
    ({"workers_per_node": "3"}, "multiple of workers_per_node, got 128 and 3"),
    ({"compress_ratio": "1.5"}, "compress_ratio .*1.5"),
    ({"sync_every": "0"}, "sync_every .*0"),
    ({"mu_dtype": "int8"}, "mu_dtype .*'int8'"),
    ({"lamb": None}, "--lamb and --slamb must be given together"),
    ({"lin": "10Gbit"}, "unrecognized arguments: --lin 10Gbit"),
]


@pytest.mark.parametrize(("changed", "message"), IMPOSSIBLE)
def test_impossible_input_gets_one_line(changed, message, capsys):
    with pytest.raises(SystemExit) as ended:
        _cli.main(words(**changed))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(rf"slamb-jax.*: .*{message}.*\n", err), err


def test_the_command_as_a_process():
    run = subprocess.run(
        [sys.executable, "-m", "slamb_jax._cli", *words(workers="0")],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert run.stderr == (
        "slamb-jax advise: workers must be an integer of at least 2, got 0\n"
    )


UNITS = [
    (_units.parse_count, "340M", 340e6), (_units.parse_count, "2.8B", 2.8e9),
    (_units.parse_count, "110e6", 110e6), (_units.parse_count, "1 k", 1e3),
    (_units.parse_rate, "10Gbit", 10e9), (_units.parse_rate, "200Mbit", 200e6),
    (_units.parse_rate, "25Gbit/s", 25e9), (_units.parse_rate, "25GB/s", 200e9),
    (_units.parse_rate, ".5Tbps", 5e11), (_units.parse_duration, "0.5s", 0.5),
    (_units.parse_duration, "300ms", 0.3), (_units.parse_duration, "50us", 50e-6),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "value"), UNITS)
def test_units(parse, text, value):
    assert parse(text) == pytest.approx(value)


def test_figures_read_well():
    assert _units.scaled(999.9e6, "bit/s") == "1 Gbit/s"
    assert _units.scaled(2.8e9, "parameters") == "2.8 G parameters"
    assert _units.duration(0.9999) == "1 s"
    assert _units.duration(3.2e-8) == "32 ns"
    assert _units.duration(0.0) == "0 ns"
