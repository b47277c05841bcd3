"""The options that all programs share, from the command line and YAML or JSON files."""

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import tyro
import yaml

import slamb_jax
from examples.common import AXIS

# Those of the exchange that the command line takes.
SETTINGS = "payload", "sync_every", "selection"
HELP = (
    "--config FILE reads options from a YAML or JSON file first. Settings of the "
    "exchange, as slamb_jax.Exchange has them, with values in YAML: "
    f"{', '.join('--' + name.replace('_', '-') for name in SETTINGS)}."
)


def read_exchange(settings: Any, where: str) -> slamb_jax.Exchange:
    """The exchange of these settings; a wrong one ends the program."""
    try:
        if isinstance(settings, dict):
            settings = {"axis_name": AXIS} | settings
        return slamb_jax.Exchange.from_json(settings)
    except ValueError as error:
        raise SystemExit(f"{where}: exchange: {error}") from error


ExchangeOption: TypeAlias = Annotated[
    slamb_jax.Exchange,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="YAML",
        instance_from_str=lambda x: read_exchange(yaml.safe_load(x[0]), "--exchange"),
        is_instance=lambda x: isinstance(x, slamb_jax.Exchange),
        str_from_instance=lambda x: [json.dumps(x.to_json())],
    ),
]
EXCHANGE = slamb_jax.Exchange(AXIS)


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of every program; each adds its own and has its own defaults."""

    optimizer: Literal["adamw", "lamb", "lion", "muon", "sgd", "slamb"] = "adamw"
    dense: bool = False
    """Average the gradients, and step with optax's optimizer: LAMB for slamb, too."""
    learning_rate: float = 0.003
    """The peak: the large-batch rate, for all workers' batches together."""
    b1: float | None = None
    """Decay of the first moment; the momentum of sgd, 0.9 by default. For this option
    and the next five, None is the optimizer's default; an optimizer leaves out those
    that it does not have."""
    b2: float | None = None
    b3: float | None = None
    """Decay of freshness, of slamb."""
    eps: float | None = None
    weight_decay: float | None = None
    """Of sgd: added to the gradient."""
    form: Literal["sum", "product"] | None = None
    clip_norm: float | None = None
    """Bound of the gradient's global norm: the worker's own; if dense, the mean's."""
    exchange: ExchangeOption = EXCHANGE
    """All settings of the exchange; single ones have options of their own."""

    batch_size: int = 32
    """Examples per worker and mini-step."""
    accumulate_steps: int = 1
    """Mini-steps whose mean gradient makes one step, and one exchange."""
    seed: int = 0

    workers: int = 4
    """In all processes together: as many accelerators, or else CPU devices."""
    coordinator: str | None = None
    """host:port of process 0. Without it, --distributed lets jax find the processes."""
    process_id: int | None = None
    num_processes: int | None = None
    distributed: bool = False
    """Join the processes that SLURM, Open MPI or Kubernetes started."""
    timeout: int = 60
    """Seconds without a sign of life of a process, after which jax ends the others."""
    step_timeout: float = 1800.0
    """Of a step, also the first, which compiles; a process that takes longer ends."""

    out: Path = Path("runs/train")
    """Checkpoints and logs; a run that was stopped resumes from there."""
    snapshots: Path | None = None
    """This process's own folder, on a RAM disk of its host. A run that lost a process
    then goes on without it, or with another: --workers may change."""
    snapshot_every: int = 10
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100


# Options that may change when a run resumes: its processes, and its output.
EVERY = "log_every", "eval_every", "checkpoint_every", "snapshot_every"
FREE = {"coordinator", "process_id", "num_processes", "distributed", "out", "workers"}
FREE |= {"timeout", "step_timeout", "snapshots", *EVERY}
LEAST = dict.fromkeys(("batch_size", "accumulate_steps", "workers", "steps", *EVERY), 1)
LEAST |= {"warmup_steps": 0, "warmup_epochs": 0, "vocabulary": 6, "length": 3}

T = TypeVar("T", bound=Options)


def parse(kind: type[T], description: str, args: Sequence[str] | None = None) -> T:
    """The options: the defaults, then ``--config FILE``, then the command line."""
    settings, rest = exchange_settings(args)
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", type=Path, action="append", default=[])
    known, rest = files.parse_known_args(rest)
    given = [word for path in known.config for word in words_of_file(kind, path)]
    options = tyro.cli(kind, args=given + rest, description=f"{description} {HELP}")
    if settings:
        exchange = read_exchange(options.exchange.to_json() | settings, "command line")
        options = dataclasses.replace(options, exchange=exchange)
    check(options)
    return options


def exchange_settings(
    args: Sequence[str] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The settings of the exchange on a command line, and the other words of it."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for name in SETTINGS:
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=lambda text: None if text == "None" else yaml.safe_load(text),
        )
    found, rest = parser.parse_known_args(args)
    return vars(found), rest


def words_of_file(kind: type[Options], path: Path) -> list[str]:
    """The options of a YAML or JSON file as words of a command line."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"--config: {path}: {error}") from error
    if not isinstance(found, dict):
        raise SystemExit(f"--config: {path} must hold a mapping of options")
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(map(str, set(found) - known)):
        raise SystemExit(f"--config: {path}: no such option: {', '.join(unknown)}")
    words: list[str] = []
    for name, value in found.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "exchange":
            exchange = read_exchange(value, str(path))
            words += [flag, json.dumps(exchange.to_json())]
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, *map(str, value if isinstance(value, list) else [value])]
    return words


def check(options: Options) -> None:
    """Raises for values out of range before anything starts."""
    if options.learning_rate <= 0:
        raise SystemExit(
            f"--learning-rate: must be positive, got {options.learning_rate}"
        )
    for name, least in LEAST.items():
        if (value := getattr(options, name, least)) < least:
            flag = f"--{name.replace('_', '-')}"
            raise SystemExit(f"{flag}: must be at least {least}, got {value}")
    manual = (options.coordinator, options.process_id, options.num_processes)
    if any(x is not None for x in manual) and None in manual:
        raise SystemExit(
            "--coordinator, --process-id and --num-processes must be given together, "
            f"got {', '.join(map(str, manual))}"
        )
    processes = options.num_processes or 1
    if processes < 1 or options.workers % processes:
        raise SystemExit(
            f"--workers: {options.workers} cannot be divided evenly over "
            f"--num-processes {processes}"
        )


def check_names(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises for names that an option does not know, before anything starts."""
    if unknown := set(given) - {*known}:
        raise SystemExit(f"{flag}: {sorted(unknown)} are none of {[*known]}")


def as_text(options: Options) -> str:
    """The options as a file that ``--config`` reads."""
    fields = dataclasses.fields(options)
    values = {f.name: getattr(options, f.name) for f in fields}
    values["exchange"] = options.exchange.to_json()
    values = json.loads(json.dumps(values, default=str))
    known = {f.name: f.default for f in fields}
    present = {k: v for k, v in values.items() if v not in (None, []) or known[k]}
    return yaml.safe_dump(present, sort_keys=False)


def check_same_run(options: Options, path: Path) -> None:
    """Raises if the run in the folder of ``path`` was started with other options."""
    before = yaml.safe_load(path.read_text())
    now = yaml.safe_load(as_text(options))
    names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
    if changed := [n for n in names if n not in FREE]:
        text = ", ".join(f"{n} was {before.get(n)}, is {now.get(n)}" for n in changed)
        raise SystemExit(f"--out: {path.parent} holds a run with other options: {text}")
