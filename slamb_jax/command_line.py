"""The command ``slamb-jax``."""

import argparse
import dataclasses
import json
import math
import pathlib
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import slamb_jax
from slamb_jax.advisor import Network, advise
from slamb_jax.advisor.advice import PREFIXES, TIMES, duration
from slamb_jax.advisor.advise import TYPICAL
from slamb_jax.exchange.settings import Exchange

_COUNTS = PREFIXES | {"K": 1e3, "B": 1e9}
_BITS = {"bit": 1, "bit/s": 1, "bps": 1, "b/s": 1, "B/s": 8}
_RATES = {p + unit: f * n for p, f in PREFIXES.items() for unit, n in _BITS.items()}
_NUMBER = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(\S*)")


def _parser(
    units: Mapping[str, float], kind: str, low: float = 0.0, high: float = 1e300
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        match = _NUMBER.fullmatch(text.strip())
        value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
        if not low <= value <= high:  # a NaN is not
            raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}")
        return value

    return parse


parse_count = _parser(_COUNTS, "a count such as 340M, 2.8B or 110e6")
parse_rate = _parser(_RATES, "a rate such as 10Gbit, 200Mbit/s or 25GB/s")  # in bits
parse_duration = _parser(TIMES, "a time such as 0.5s, 300ms or 50us")
_SHARE = "a share such as 5% or 0.05, above 0 and at most 100%"
parse_share = _parser({"": 1.0, "%": 0.01}, _SHARE, 1e-300, 1.0)


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
_ADVISE = {
    "--params": (parse_count, "340M", "number of parameters"),
    "--workers": (int, "128", "number of workers"),
    "--link": (parse_rate, "10Gbit", "rate of a node's link to the others"),
    "--step": (parse_duration, "0.5s", "compute of a step, forward and backward pass"),
}
_NETWORK = {
    "--workers-per-node": (int, "8", "default: 1"),
    "--local-link": (parse_rate, "200Gbit", "rate within a node; default: unlimited"),
    "--latency": (parse_duration, "20us", "of one message, with Gloo (between CPUs) a "
                  "round trip; default: 20us"),
    "--dense-update": (parse_duration, "10ms", "update of a dense step, where --step "
                       "does not include it: python -m benchmarks.step, in the "
                       "repository, measures both updates; default: 0s"),
    "--exchanging-update": (parse_duration, "10ms", "the same with the exchange"),
}  # fmt: skip
_EXCHANGE = {
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
    program = {"program": (pathlib.Path, "PROGRAM", "file with the text")}
    for run, text, options in (
        (_advise, "predict whether an exchange pays", _ADVISE),
        (_report, "list what a compiled program sends", program),
    ):
        command = commands.add_parser(
            run.__name__[1:], help=text, description=run.__doc__, allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )  # fmt: skip
        command.set_defaults(run=run)
        _add(command, options, required=True)
        command.add_argument("--json", action="store_true", help="print JSON")
        if run is _advise:
            _add(command, _NETWORK)
            about = "Settings of slamb_jax.Exchange."
            _add(group := command.add_argument_group("exchange", about), _EXCHANGE)
            group.add_argument(
                "--overlap", action=argparse.BooleanOptionalAction,
                help="exchange during the compute; default: --no-overlap",
            )  # fmt: skip
    given = vars(parser.parse_args(arguments))
    try:
        print(given["run"](given))
    except (ValueError, OSError, ImportError) as error:
        commands.choices[given["command"]].error(str(error))


def _add(to: Any, options: Mapping[str, tuple[Any, str, str]], **how: Any) -> None:
    for name, (parse, metavar, text) in options.items():
        more = how if name.startswith("-") else {}
        to.add_argument(name, type=parse, metavar=metavar, help=text, **more)


def _report(given: Mapping[str, Any]) -> str:
    """Lists the collectives of a compiled program, as slamb_jax.wire_report does.

    PROGRAM has its text: that of compiled.as_text(), or *after_optimizations.txt, which
    XLA writes with XLA_FLAGS=--xla_dump_to=DIR.
    """
    report = slamb_jax.wire_report(given["program"].read_text())
    return json.dumps(report.to_json(), indent=2) if "json" in given else str(report)


def _advise(given: Mapping[str, Any]) -> str:
    """Predicts a step's seconds with an exchange and without, and whether it pays.

    Says what is recorded of the loss, too. The model is that of slamb_jax.advise.
    """
    exchange, network = _exchange(given), Network(**_settings_of(Network, given))
    updates = [given.get(f"{x}_update", 0.0) for x in ("dense", "exchanging")]
    seconds = {"step_seconds": given["step"], "update_seconds": updates}
    advice = advise(given["params"], network, exchange, **seconds)
    printed, numbers = str(advice), {"exchange": exchange.to_json()} | advice.to_json()
    shares_link = 1 < network.workers_per_node < network.workers
    if shares_link and exchange.local_axis_name is None:
        groups = dataclasses.replace(exchange, local_axis_name="device")
        per_node = advise(given["params"], network, groups, **seconds)
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


def _exchange(given: Mapping[str, Any]) -> Exchange:
    """The exchange of ``--exchange FILE``, with the options given beside it."""
    recorded, settings = (
        given.get("exchange", Exchange()),
        _settings_of(Exchange, given),
    )
    axis = {"axis_name": recorded.axis_name or "data"}
    exchange = dataclasses.replace(recorded, **axis | settings)
    if "budget" not in given:
        return exchange
    if "payload" in settings:
        raise ValueError(
            f"--budget chooses the payload, which is given: {exchange.payload!r}"
        )
    names = {field.name for field in dataclasses.fields(Exchange)} - {"payload"}
    settings = {name: getattr(exchange, name) for name in names}
    return Exchange.for_budget(share=given["budget"], params=TYPICAL, **settings)


def _settings_of(kind: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of this dataclass."""
    names = {field.name for field in dataclasses.fields(kind)} & given.keys()
    return {name: given[name] for name in names}


if __name__ == "__main__":
    main()
