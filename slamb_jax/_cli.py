"""The command ``slamb-jax``."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from slamb_jax._advise import advise
from slamb_jax._network import Network
from slamb_jax._quantize import PAYLOADS, parse_payload
from slamb_jax._resize import resize_checkpoint
from slamb_jax._units import parse_count, parse_duration, parse_rate

_NEEDED = (
    ("params", parse_count, "340M", "number of parameters"),
    ("workers", int, "128", "number of workers"),
    ("link", parse_rate, "10Gbit", "rate of a node's link to the others"),
    ("step", parse_duration, "0.5s", "compute of a step, forward and backward pass"),
)
_NETWORK = (
    ("workers-per-node", int, "8", "default: 1"),
    ("local-link", parse_rate, "200Gbit", "rate in a node; default: without limit"),
    ("latency", parse_duration, "20us", "of one message; default: 20us"),
)
_SLAMB = (
    ("compress-ratio", float, "0.1", "k, the share sent per step; default: 0.1"),
    ("sync-every", int, "100", "H, steps between averages; default: 100"),
    ("mu-dtype", str, "bfloat16", "dtype of what is sent; default: float32"),
    (
        "payload",
        parse_payload,
        "uniform8",
        f"what is sent instead: {', '.join(PAYLOADS)}",
    ),
    ("average-payload", parse_payload, "uniform8", "the same for the parameters"),
)
_UPDATES = tuple(
    (name, parse_duration, "10ms", f"{name.upper()}'s update on your accelerator; give "
     "--lamb and --slamb, or neither to have them measured here and now")
    for name in ("lamb", "slamb")
)  # fmt: skip


class _OneLine(argparse.ArgumentParser):
    """A parser that says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; impossible input ends it with one line and exit status 2."""
    parser = _OneLine(prog="slamb-jax", description="SLAMB for JAX.")
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser(
        "advise",
        help="predict whether SLAMB pays",
        description="Predicts the step time of SLAMB and of dense LAMB, and whether "
        "SLAMB pays. The model is that of slamb_jax.advise.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for options in (_NEEDED, _NETWORK, _SLAMB, _UPDATES):
        for name, parse, metavar, text in options:
            command.add_argument(
                f"--{name}", type=_typed(parse), metavar=metavar, help=text,
                required=options is _NEEDED,
            )  # fmt: skip
    command.add_argument(
        "--hierarchical", action="store_true",
        help="average gradients in each node, exchange momentum between nodes",
    )  # fmt: skip
    command.add_argument(
        "--overlap", action="store_true", help="exchange during the compute"
    )
    _add_resize(commands)
    given = vars(parser.parse_args(arguments))
    run = {"advise": _print_advice, "resize": _print_resized}[given["command"]]
    try:
        run(given)
    except (ValueError, ImportError) as error:
        commands.choices[given["command"]].error(str(error))


def _add_resize(commands: Any) -> None:
    command = commands.add_parser(
        "resize",
        help="make a checkpoint of n workers one of m",
        description="Writes the latest checkpoint of a directory for another number of "
        "workers, by the rule of slamb_jax.resize.",
        allow_abbrev=False,
    )
    for name, text in (
        ("checkpoint", "directory that slamb_jax.Checkpoints wrote"),
        ("out", "directory for the new one; must be empty or new"),
    ):
        command.add_argument(name, type=pathlib.Path, metavar=name.upper(), help=text)
    command.add_argument(
        "--workers", type=int, required=True, metavar="8", help="number of workers"
    )


def _print_resized(given: dict[str, Any]) -> None:
    print(resize_checkpoint(given["checkpoint"], given["out"], given["workers"]))


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, whose message argparse passes on."""

    def typed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def _print_advice(given: dict[str, Any]) -> None:
    def chosen(options: tuple[Any, ...]) -> dict[str, Any]:
        names = [name.replace("-", "_") for name, *_ in options]
        return {name: given[name] for name in names if name in given}

    network = Network(given["workers"], given["link"], **chosen(_NETWORK))
    updates = tuple(chosen(_UPDATES).values())
    if len(updates) == 1:
        raise ValueError("--lamb and --slamb must be given together")
    print(
        advise(
            given["params"],
            network,
            step_seconds=given["step"],
            optimizer_seconds=updates or None,
            hierarchical=given.get("hierarchical", False),
            overlap=given.get("overlap", False),
            **chosen(_SLAMB),
        )
    )
    if not updates:
        print(
            f"Optimizer times were measured now on {jax.devices()[0].device_kind!r}: "
            "for another machine give --lamb and --slamb."
        )


if __name__ == "__main__":
    main()
