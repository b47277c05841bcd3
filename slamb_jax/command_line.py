"""The command ``slamb-jax``."""

import argparse
import dataclasses
import json
import math
import pathlib
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeAlias

import slamb_jax
from slamb_jax.advisor import Advice, Network, advise
from slamb_jax.advisor.advice import PREFIXES, TIMES, duration
from slamb_jax.exchange.settings import Exchange

Units: TypeAlias = Mapping[str, float]
Given: TypeAlias = Mapping[str, Any]  # options on the command line, by name
_COUNTS = PREFIXES | {"K": 1e3, "B": 1e9}
_BITS = {"bit": 1, "bit/s": 1, "bps": 1, "b/s": 1, "B/s": 8}
_RATES = {p + unit: f * n for p, f in PREFIXES.items() for unit, n in _BITS.items()}
_NUMBER = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(\S*)")


def _parse(units: Units, kind: str, bounds: tuple[float, float], text: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
    if not bounds[0] <= value <= bounds[1]:  # a NaN is not
        raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}")
    return value


_ANY, _PART = (0.0, 1e300), (1e-300, 1.0)
_RATE = "a rate such as 10Gbit, 200Mbit/s or 25GB/s"
_SHARE = "a share such as 5% or 0.05, above 0 and at most 100%"
parse_count = partial(_parse, _COUNTS, "a count such as 340M, 2.8B or 110e6", _ANY)
parse_rate = partial(_parse, _RATES, _RATE, _ANY)  # in bits
parse_duration = partial(_parse, TIMES, "a time such as 0.5s, 300ms or 50us", _ANY)
parse_share = partial(_parse, {"": 1.0, "%": 0.01}, _SHARE, _PART)


def parse_exchange(path: str) -> Exchange:
    """The exchange of a file that :meth:`Exchange.to_json` made."""
    try:
        return Exchange.from_json(json.loads(pathlib.Path(path).read_text()))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {error}") from error


def parse_setting(text: str) -> int | str | None:
    """A number, None for ``null`` or ``never``, or any other text as it is."""
    value = int(text) if text.isdecimal() else text
    return None if value in ("null", "never") else value


# Each option: how it is read, an example, and its help.
Options: TypeAlias = Mapping[str, tuple[Callable[[str], Any], str, str]]
_ADVISE: Options = {
    "--params": (parse_count, "340M", "number of parameters"),
    "--workers": (int, "128", "number of workers"),
    "--link": (parse_rate, "10Gbit", "rate of a node's link to the others"),
    "--step": (parse_duration, "0.5s", "compute of a step, forward and backward pass"),
}
_NETWORK: Options = {
    "--workers-per-node": (int, "8", "default: 1"),
    "--local-link": (parse_rate, "200Gbit", "rate within a node; default: unlimited"),
    "--latency": (parse_duration, "20us", "of one message, with Gloo (between CPUs) a "
                  "round trip; default: 20us"),
    "--dense-update": (parse_duration, "10ms", "update of a dense step, where --step "
                       "does not include it: python -m benchmarks.step, in the "
                       "repository, measures both updates; default: 0s"),
    "--exchanging-update": (parse_duration, "10ms", "the same with the exchange"),
}  # fmt: skip
_EXCHANGE: Options = {
    "--exchange": (parse_exchange, "FILE", "JSON that Exchange.to_json made, with any "
                   "settings; the options below override it"),
    "--budget": (parse_share, "5%", "choose the payload for so much of the bytes of "
                 "averaging gradients in float32, half of their share in bfloat16"),
    "--axis-name": (str, "data", "mesh axis of the workers; default: data"),
    "--local-axis-name": (str, "device", "mesh axis of the devices of a node, which is "
                          "then one worker; default: a worker is one device"),
    "--payload": (parse_setting, "uniform8", "wire format: bfloat16, uniform8, "
                  "uniform4, ternary, sign, largest_of_N with N from 2 to 127, or "
                  "null for float32; default: ternary"),
    "--sync-every": (parse_setting, "100", "H, steps between averages of the "
                     "parameters, or never; default: 1, the momentum at every step"),
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
    for run, what in ((_advise, "predict whether an exchange pays"),
                      (_report, "list what a compiled program sends")):  # fmt: skip
        command = commands.add_parser(
            run.__name__[1:], help=what, description=run.__doc__, allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )  # fmt: skip
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON")
    advising, reporting = commands.choices.values()
    _add_options(advising, _ADVISE, required=True)
    _add_options(advising, _NETWORK)
    group = advising.add_argument_group("exchange", "Settings of slamb_jax.Exchange.")
    _add_options(group, _EXCHANGE)
    group.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction,
        help="exchange during the compute; default: --no-overlap",
    )  # fmt: skip
    reporting.add_argument(
        "program", type=pathlib.Path, metavar="PROGRAM", help="file with the text"
    )
    given = vars(parser.parse_args(arguments))
    try:
        print(given["run"](given))
    except (ValueError, OSError, ImportError) as error:
        commands.choices[given["command"]].error(str(error))


def _add_options(
    to: argparse._ActionsContainer, options: Options, *, required: bool = False
) -> None:
    for name, (parse, metavar, text) in options.items():
        to.add_argument(name, type=parse, metavar=metavar, help=text, required=required)


def _report(given: Given) -> str:
    """Lists the collectives of a compiled program, as slamb_jax.wire_report does.

    PROGRAM has its text: that of compiled.as_text(), or *after_optimizations.txt, which
    XLA writes with XLA_FLAGS=--xla_dump_to=DIR.
    """
    report = slamb_jax.wire_report(given["program"].read_text())
    return json.dumps(report.to_json(), indent=2) if "json" in given else str(report)


def _advise(given: Given) -> str:
    """Predicts a step's seconds with an exchange and without, and whether it pays.

    Says what is recorded of the loss, too. The model is that of slamb_jax.advise.
    """
    network = Network(**_settings_of(Network, given))
    updates = given.get("dense_update", 0.0), given.get("exchanging_update", 0.0)
    seconds: dict[str, Any] = {"step_seconds": given["step"], "update_seconds": updates}
    ask: Callable[..., Advice] = partial(advise, given["params"], network, **seconds)
    advice = ask(_exchange(given), budget=given.get("budget"))
    exchange, printed = advice.exchange, str(advice)
    numbers = {"exchange": exchange.to_json()} | advice.to_json()
    shares_link = 1 < network.workers_per_node < network.workers
    if shares_link and exchange.local_axis_name is None:
        per_node = ask(dataclasses.replace(exchange, local_axis_name="device"))
        if per_node.speedup >= advice.THRESHOLD * advice.speedup:
            numbers["per_node"] = per_node.to_json()
            text = (
                "One worker per node shares the link with nobody: --local-axis-name "
                f"device takes {duration(per_node.exchanging.step_seconds)} a step, "
                f"{per_node.speedup:.2f} times as fast as a dense one in float32 and "
                f"{per_node.speedup_bfloat16:.2f} times as fast as one in bfloat16."
            )
            printed += "\n" + textwrap.fill(text, 88)
    return json.dumps(numbers, indent=2) if "json" in given else printed


def _exchange(given: Given) -> Exchange:
    """The exchange of ``--exchange FILE``, with the options given beside it."""
    recorded = given.get("exchange", Exchange())
    axis = {"axis_name": recorded.axis_name or "data"}
    return dataclasses.replace(recorded, **axis | _settings_of(Exchange, given))


def _settings_of(kind: type[Network | Exchange], given: Given) -> dict[str, Any]:
    """The options that are fields of this dataclass."""
    names = {field.name for field in dataclasses.fields(kind)} & given.keys()
    return {name: given[name] for name in names}


if __name__ == "__main__":
    main()
