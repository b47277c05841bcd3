"""The command ``slamb-jax``."""

import argparse
import dataclasses
import json
import pathlib
from typing import Any, NoReturn

import jax

import slamb_jax
from slamb_jax.advisor import Network, advise
from slamb_jax.advisor.units import parse_count, parse_duration, parse_rate
from slamb_jax.checkpoint import resize_checkpoint
from slamb_jax.exchange.payloads import NAMES
from slamb_jax.exchange.settings import Exchange

_AXIS_NAME = "workers"  # where no file names it
_REQUIRED = (
    ("params", parse_count, "340M", "number of parameters"),
    ("workers", int, "128", "number of workers"),
    ("link", parse_rate, "10Gbit", "rate of a node's link to the others"),
    ("step", parse_duration, "0.5s", "compute of a step, forward and backward pass"),
)
_UPDATE = (
    "update on your accelerator; default: both updates are measured on this machine"
)
_OPTIONAL = (
    ("workers-per-node", int, "8", "default: 1"),
    ("local-link", parse_rate, "200Gbit", "rate within a node; default: unlimited"),
    ("latency", parse_duration, "20us", "of one message; default: 20us"),
    ("mu-dtype", str, "bfloat16", "dtype of the momentum; default: float32"),
    ("lamb", parse_duration, "10ms", f"LAMB's {_UPDATE}"),
    ("slamb", parse_duration, "10ms", f"SLAMB's {_UPDATE}"),
)
_EXCHANGE = (
    ("local-axis-name", "device", "groups: average gradients densely within each node, "
     "and exchange momentum between nodes; default: null, no groups"),
    ("compress-ratio", "0.1", "k, the share exchanged per step; default: 0.1"),
    ("min-size", "9000", "smaller matrices are dense; default: 9000, or less where "
     "they would hold more than 1 %% of the parameters"),
    ("payload", "uniform8", f"wire format of the momentum: {', '.join(NAMES)}; "
     "default: null, the momentum's dtype"),
    ("sync-every", "100", "H, steps between averages of the parameters, or null: "
     "never; default: 100"),
    ("average-payload", "uniform8", "wire format of the parameters; default: null, "
     "their dtype"),
)  # fmt: skip


class _OneLine(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; bad input ends it with one line and exit status 2."""
    parser = _OneLine(prog="slamb-jax", description="SLAMB for JAX.")
    version = f"slamb-jax {slamb_jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, dest="command")
    _add_advise(commands)
    _add_resize(commands)
    given = vars(parser.parse_args(arguments))
    try:
        given["run"](given)
    except (ValueError, ImportError) as error:
        commands.choices[given["command"]].error(str(error))


def _add_advise(commands: Any) -> None:
    command = commands.add_parser(
        "advise",
        help="predict whether SLAMB pays",
        description="Predicts the step time of SLAMB and of dense LAMB, and whether "
        "SLAMB pays. The model is that of slamb_jax.advise.",
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
    group = command.add_argument_group(
        "exchange", "The settings of slamb_jax.Exchange, by the same names."
    )
    group.add_argument(
        "--exchange", type=pathlib.Path, metavar="FILE",
        help="JSON that Exchange.to_json made; the options below override it",
    )  # fmt: skip
    for name, metavar, text in _EXCHANGE:
        group.add_argument(f"--{name}", type=_json_or_text, metavar=metavar, help=text)
    group.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction,
        help="exchange during the compute; default: --no-overlap",
    )  # fmt: skip


def _add_resize(commands: Any) -> None:
    command = commands.add_parser(
        "resize",
        help="turn a checkpoint of n workers into one of m",
        description="Writes the latest checkpoint of a directory for another number of "
        "workers, by the rule of slamb_jax.resize.",
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
    updates = tuple(given[name] for name in ("lamb", "slamb") if name in given)
    if len(updates) == 1:
        raise ValueError("--lamb and --slamb must be given together")
    advice = advise(
        given["params"],
        Network(**_settings_of(Network, given)),
        _exchange(given),
        step_seconds=given["step"],
        mu_dtype=given.get("mu_dtype"),
        optimizer_seconds=updates or None,
    )
    print(advice)
    if not updates:
        print(
            f"Optimizer times were measured now on {jax.devices()[0].device_kind!r}: "
            "for another machine give --lamb and --slamb."
        )


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
    return Exchange.from_json({"axis_name": _AXIS_NAME} | settings | options)


def _settings_of(kind: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of this dataclass."""
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: given[name] for name in names if name in given}


def _json_or_text(text: str) -> Any:
    """A number, null or an object as JSON has them, and any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
