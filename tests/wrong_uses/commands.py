"""Wrong command lines, and wrong runs of the example."""

from pathlib import Path

from examples.byte_lm import data
from examples.byte_lm.main import Config
from examples.byte_lm.main import main as byte_lm
from slamb_jax import command_line
from tests.wrong_uses.common import NAN


def command(text):
    return lambda: command_line.main(text.split())


ADVISE = "advise --params 1M --workers 8 --link 1Gbit --step 1s "


COMMANDS = [
    (command(""), "arguments are required: command"),
    (command("average"), "invalid choice: 'average'"),
    (command("advise --params 1M"), "required: --workers, --link, --step"),
    (command(ADVISE + "--params lots"), "--params: .*'lots'"),
    (command(ADVISE + "--workers many"), "--workers: .*'many'"),
    (command(ADVISE + "--link 10"), "--link: must be a rate such as .*, got '10'"),
    (command(ADVISE + "--lin 10Gbit"), "unrecognized arguments: --lin 10Gbit"),
    (command(ADVISE + "--budget 0.05%"), "budget must be at least 0.00.*outer"),
    (command(ADVISE + "--budget 101%"), r"budget must be in \(0.0, 1.0\], got 1.01"),
    (command(ADVISE + "--budget five"), "a share such as 5% or 0.05, .*got 'five'"),
    (command(ADVISE + "--budget 5% --payload null"), "chooses the payload.*None"),
]


def reading(contents):
    def call(directory):
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        data.load(data.text_files([directory]), context=64)

    return call


def running(**settings):
    return lambda directory: byte_lm(Config(**({"out": directory} | settings)), {})


OUT_OF_RANGE = [("workers", 0), ("workers", 2.5), ("steps", 0), ("batch", 0)]
OUT_OF_RANGE += [("context", -1), ("layers", 0), ("evaluations", 0)]

CONFIGS = [
    *((running(**{name: x}), f"{name} .*{x}") for name, x in OUT_OF_RANGE),
    (running(width=96, heads=5), "width .*heads.*96 and 5"),
    (running(rate=(NAN,) * 4), "rate .*nan"),
    (running(rate=(-1.0,) * 4), "rate .*-1.0"),
    (running(rate=(0.1,)), "rate must have one value for each of 4"),
    (running(optimizer=("best",)), "name .*'best'"),
]

BYTE_LM = [
    (running(files=(Path("/nowhere/text"),)), "--files: .*/nowhere/text"),
    (running(out=Path("/proc/nowhere")), "--out: .*/proc/nowhere"),
    (reading({}), "--files: 0 bytes in 0 files"),
    (reading({"a": b"abc" * 50}), "--files: 150 bytes in 1 files"),
]
