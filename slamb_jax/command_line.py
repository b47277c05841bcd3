"""The command ``slamb-jax``."""

import argparse
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import slamb_jax
from slamb_jax.advisor import Advice, Network, advise
from slamb_jax.advisor.units import COUNTS, RATES, TIMES
from slamb_jax.exchange.settings import Exchange

_NUMBER = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(\S*)")


def _parse(units: Mapping[str, float], kind: str, text: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}")
    return float(match[1]) * units[match[2]]


parse_count = partial(_parse, COUNTS, "a count such as 340M, 2.8B or 110e6")
parse_rate = partial(_parse, RATES, "a rate such as 10Gbit, 200Mbit/s or 25GB/s")
parse_duration = partial(_parse, TIMES, "a time such as 0.5s, 300ms or 50us")
parse_share = partial(_parse, {"": 1.0, "%": 0.01}, "a share such as 5% or 0.05")


def parse_payload(text: str) -> str | None:
    """The name of a payload; ``null`` is float32."""
    return None if text == "null" else text


_NEEDED = ("--params", "--workers", "--link", "--step")
# Of each option how it is read, an example, and its help.
_OPTIONS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "--params": (parse_count, "340M", "number of parameters"),
    "--workers": (int, "128", "number of workers"),
    "--link": (parse_rate, "10Gbit", "rate of a node's link to the others"),
    "--step": (parse_duration, "0.5s", "compute of a step, forward and backward pass"),
    "--workers-per-node": (int, "8", "default: 1"),
    "--local-link": (parse_rate, "200Gbit", "rate within a node; default: unlimited"),
    "--latency": (parse_duration, "20us", "of one message, with Gloo (between CPUs) a "
                  "round trip; default: 20us"),
    "--budget": (parse_share, "5%", "choose the payload for so much of the bytes of "
                 "averaging gradients in float32, half of their share in bfloat16"),
    "--local-axis-name": (str, "device", "mesh axis of the devices of a node, which is "
                          "then one worker; default: a worker is one device"),
    "--payload": (parse_payload, "uniform8", "wire format: bfloat16, uniform8, "
                  "uniform4, ternary, sign, largest_of_N with N from 2 to 127, or "
                  "null for float32; default: ternary"),
}  # fmt: skip


class _OneLine(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; bad input ends it with one line and exit status 2."""
    parser = _OneLine(prog="slamb-jax", description=slamb_jax.__doc__.splitlines()[0])
    version = f"slamb-jax {slamb_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser(
        "advise", help="predict whether an exchange pays", description=_advise.__doc__,
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
    )  # fmt: skip
    for name, (parse, metavar, text) in _OPTIONS.items():
        command.add_argument(
            name, type=parse, metavar=metavar, help=text, required=name in _NEEDED
        )
    given = vars(parser.parse_args(arguments))
    try:
        print(_advise(given))
    except ValueError as error:
        command.error(str(error))


def _advise(given: Mapping[str, Any]) -> Advice:
    """Predicts a step's seconds with an exchange and without, and whether it pays.

    Says what is recorded of the loss, too. The model is that of slamb_jax.advise.
    """
    # The options that are fields of each.
    network, exchange = (
        {name: given[name] for name in kind.__dataclass_fields__ if name in given}
        for kind in (Network, Exchange)
    )
    return advise(
        given["params"],
        Network(**network),
        Exchange("data", **exchange),
        step_seconds=given["step"],
        budget=given.get("budget"),
    )


if __name__ == "__main__":
    main()
