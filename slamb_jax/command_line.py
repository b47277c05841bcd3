"""The command ``slamb-jax``."""

import argparse
import dataclasses
import json
import pathlib
from typing import Any, NoReturn

import slamb_jax
from slamb_jax._ex.budget import FORMATS, expected_loss
from slamb_jax._ex.json_form import from_json
from slamb_jax._ex.payloads import NAMES
from slamb_jax.advisor import Advice, Network, advise
from slamb_jax.advisor.parameters import TYPICAL
from slamb_jax.advisor.units import (
    duration,
    parse_count,
    parse_duration,
    parse_rate,
    parse_share,
)
from slamb_jax.checkpoint import resize_checkpoint
from slamb_jax.exchange import Exchange

_AXIS_NAME = "workers"  # where no file names it
_REQUIRED = (
    ("params", parse_count, "340M", "number of parameters"),
    ("workers", int, "128", "number of workers"),
    ("link", parse_rate, "10Gbit", "rate of a node's link to the others"),
    ("step", parse_duration, "0.5s", "compute of a step, forward and backward pass"),
)
_UPDATE = "update, where --step does not include it; default: 0s"
_DEFAULT = {field.name: field.default for field in dataclasses.fields(Exchange)}
_OPTIONAL = (
    ("workers-per-node", int, "8", "default: 1"),
    ("local-link", parse_rate, "200Gbit", "rate within a node; default: unlimited"),
    ("latency", parse_duration, "20us", "of one message; default: 20us"),
    ("mu-dtype", str, "bfloat16", "dtype of the momentum; default: float32"),
    ("dense-update", parse_duration, "10ms", f"a dense optimizer's {_UPDATE}"),
    ("exchanging-update", parse_duration, "10ms", f"an exchanging one's {_UPDATE}"),
)
_FORMATS = ", ".join(NAMES)
_EXCHANGE = (
    ("local-axis-name", "device", "groups: average gradients densely within each node, "
     "and exchange between nodes; default: null, no groups"),
    ("compress-ratio", "0.1", "k, the share of the momentum exchanged per step; "
     "default: 0"),
    ("min-size", "9000", "smaller matrices are dense; default: 9000, or less where "
     "they would hold more than 1 %% of the parameters"),
    ("payload", "uniform8", f"wire format of the momentum: {_FORMATS} or null: "
     f"its dtype; default: {json.dumps(_DEFAULT['payload'])}"),
    ("sync-every", "100", "H, steps between averages of the parameters, or "
     f"never; default: {_DEFAULT['sync_every']}"),
    ("rolling", "false", "average 1/H of the parameters at each step; default: true"),
    ("average-payload", "uniform8", "wire format of the average, likewise; null: "
     f"float32, or the parameters' dtype; default: {_DEFAULT['average_payload']}"),
)  # fmt: skip


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
    _add_advise(commands)
    _add_report(commands)
    _add_resize(commands)
    given = vars(parser.parse_args(arguments))
    try:
        given["run"](given)
    except (ValueError, ImportError) as error:
        commands.choices[given["command"]].error(str(error))


def _add_advise(commands: Any) -> None:
    command = commands.add_parser(
        "advise",
        help="predict whether an exchange pays",
        description="Predicts the seconds of a step with an exchange and without, and "
        "whether it pays. The model is that of slamb_jax.advise.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    command.set_defaults(run=_print_advice)
    for options in (_REQUIRED, _OPTIONAL):
        for name, parse, metavar, text in options:
            command.add_argument(
                f"--{name}", type=parse, metavar=metavar, help=text,
                required=options is _REQUIRED,
            )  # fmt: skip
    command.add_argument(
        "--json", action="store_true", default=False, help="print numbers as JSON"
    )
    group = command.add_argument_group(
        "exchange", "The settings of slamb_jax.Exchange, by the same names."
    )
    group.add_argument(
        "--exchange", type=pathlib.Path, metavar="FILE",
        help="JSON that Exchange.to_json made; the options below override it",
    )  # fmt: skip
    group.add_argument(
        "--budget", type=parse_share, metavar="5%",
        help="choose average-payload for so much of the bytes of averaging gradients "
        "in float32",
    )  # fmt: skip
    for name, metavar, text in _EXCHANGE:
        group.add_argument(f"--{name}", type=_json_or_text, metavar=metavar, help=text)
    group.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction,
        help="exchange during the compute; default: --no-overlap",
    )  # fmt: skip


def _add_report(commands: Any) -> None:
    command = commands.add_parser(
        "report",
        help="list what a compiled program sends",
        description="Lists the collectives of a compiled program, as "
        "slamb_jax.wire_report does, from its text: compiled.as_text(), or what "
        "XLA_FLAGS=--xla_dump_to=DIR wrote as *after_optimizations.txt.",
        allow_abbrev=False,
    )
    command.add_argument("program", type=pathlib.Path, metavar="PROGRAM")
    command.add_argument("--json", action="store_true", help="print it as JSON")
    command.set_defaults(run=_print_report)


def _print_report(given: dict[str, Any]) -> None:
    try:
        text = given["program"].read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"PROGRAM must be a text file: {error}") from error
    if "ENTRY" not in text:
        raise ValueError(f"PROGRAM must have the text of a program: {given['program']}")
    report = slamb_jax.wire_report(text)
    print(json.dumps(report.to_json(), indent=2) if given["json"] else report)


def _add_resize(commands: Any) -> None:
    command = commands.add_parser(
        "resize",
        help="turn a checkpoint of n workers into one of m",
        description="Writes the latest checkpoint of a directory for another number of "
        "workers, by the rule of slamb_jax.checkpoint.resize.",
        allow_abbrev=False,
    )
    command.set_defaults(
        run=lambda x: print(resize_checkpoint(x["checkpoint"], x["out"], x["workers"]))
    )
    for name, text in (
        ("checkpoint", "directory that slamb_jax.Checkpoints wrote"),
        ("out", "directory for the new one; must be empty or new"),
    ):
        command.add_argument(name, type=pathlib.Path, metavar=name.upper(), help=text)
    command.add_argument(
        "--workers", type=int, required=True, metavar="8", help="number of workers"
    )


def _print_advice(given: dict[str, Any]) -> None:
    exchange, network = _exchange(given), Network(**_settings_of(Network, given))

    def advice_on(exchange: Exchange) -> Advice:
        return advise(
            given["params"],
            network,
            exchange,
            step_seconds=given["step"],
            mu_dtype=given.get("mu_dtype"),
            update_seconds=tuple(
                given.get(f"{name}_update", 0.0) for name in ("dense", "exchanging")
            ),
        )

    advice = advice_on(exchange)
    per_node = None
    if (
        exchange.local_axis_name is None
        and 1 < network.workers_per_node < network.workers
    ):
        per_node = advice_on(dataclasses.replace(exchange, local_axis_name="device"))
        if per_node.speedup < advice.THRESHOLD * advice.speedup:
            per_node = None
    if given["json"]:
        found = {"exchange": exchange.to_json()} | advice.to_json()
        if per_node:
            found["per_node"] = per_node.to_json()
        print(json.dumps(found, indent=2))
        return
    print(advice)
    if per_node:
        seconds = duration(per_node.exchanging.step_seconds)
        print(
            "One worker per node shares the link with nobody: --local-axis-name device "
            f"takes {seconds}\na step, a speed-up of {per_node.speedup:.2f}."
        )
    if "budget" in given:
        print(_beside_budget(exchange), expected_loss(exchange), sep="\n")


def _beside_budget(exchange: Exchange) -> str:
    """The share that was found, and the next one above it."""

    def takes(exchange: Exchange) -> str:
        return f"{100 * exchange.share(TYPICAL):.3g}%"

    payload = exchange.average_payload
    said = f"{payload} takes {takes(exchange)} of the dense bytes"
    if payload not in FORMATS[1:]:
        return f"{said}."
    above = FORMATS[FORMATS.index(payload) - 1]
    other = dataclasses.replace(exchange, average_payload=above)
    return f"{said}, {above} would take {takes(other)}."


def _exchange(given: dict[str, Any]) -> Exchange:
    """The exchange of ``--exchange FILE``, with the options given beside it."""
    settings = {}
    if path := given.get("exchange"):
        try:
            settings = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"--exchange must be a file with a JSON object, got {path}: {error}"
            ) from error
    options = _settings_of(Exchange, given)
    settings = {"axis_name": _AXIS_NAME} | settings | options
    if "budget" not in given:
        return Exchange.from_json(settings)
    if "average_payload" in settings:
        raise ValueError(
            "--budget chooses average_payload, which is given: "
            f"{settings['average_payload']!r}"
        )
    found = from_json(settings, list(_DEFAULT))
    return Exchange.for_budget(
        found.pop("axis_name"), given["budget"], TYPICAL, **found
    )


def _settings_of(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of this dataclass."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: given[name] for name in names if name in given}


def _json_or_text(text: str) -> Any:
    """A number, null or an object as JSON has them, and any other text as it is.

    Null may also be said as ``never``, which it is for a number of steps.
    """
    if text == "never":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
