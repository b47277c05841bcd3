"""The options that all programs share, from the command line and YAML or JSON files."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
import yaml


@dataclasses.dataclass(frozen=True)
class Options:
    """What every program takes; each adds its own and has its own defaults."""

    optimizer: Literal["slamb", "lamb", "sgdm"] = "slamb"
    learning_rate: float = 0.01
    """The peak: the large-batch rate, for all workers' batches together."""
    b1: float = 0.9
    """Decay of the first moment; the momentum of sgdm."""
    b2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0
    clip_norm: float | None = None
    """Bound of the gradient's global norm: the worker's own; if dense, the mean's."""
    compress_ratio: float | dict[int, float] = 0.1
    """k, or a mapping from a step to the k that holds from it on."""
    b3: float = 0.99
    """Decay of a coordinate's freshness: the one to tune."""
    sync_every: int = 50
    """H, steps from one average of the parameters to the next."""
    min_size: int = 9000
    """Leaves with fewer elements are exchanged whole."""
    form: Literal["sum", "product"] = "sum"
    nu_of: Literal["gradient", "momentum", "larger"] = "gradient"
    """What SLAMB's v is the second moment of."""
    payload: Literal["bfloat16", "8bit", "4bit"] | None = None
    """What travels of the momentum: None is float32; bits are rounded at random."""
    average_payload: Literal["bfloat16", "8bit", "4bit"] | None = None
    """What travels of the parameters every H steps, likewise."""

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
    timeout: float = 60.0
    """Seconds without a sign of life of another process, after which this one ends."""

    out: Path = Path("runs/program")
    """Checkpoints and logs; a run that was stopped goes on from there."""
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100


# What may change when a run goes on: where it runs and what is written of it.
FREE = {"coordinator", "process_id", "num_processes", "distributed", "timeout", "out"}
FREE |= {"log_every", "eval_every", "checkpoint_every"}
LEAST = dict.fromkeys(("batch_size", "accumulate_steps", "workers", "sync_every"), 1)
LEAST |= dict.fromkeys(("log_every", "eval_every", "checkpoint_every", "steps"), 1)
LEAST |= {"warmup_steps": 0, "warmup_epochs": 0, "vocabulary": 6, "length": 3}

T = TypeVar("T", bound=Options)


def parse(kind: type[T], description: str, args: Sequence[str] | None = None) -> T:
    """The options: the defaults, then ``--config FILE``, then the command line."""
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    files.add_argument("--config", type=Path, action="append", default=[])
    known, rest = files.parse_known_args(args)
    default = kind()
    for path in known.config:
        default = from_file(default, path)
    description += " --config FILE reads options from a YAML or JSON file first."
    options = tyro.cli(kind, args=rest, default=default, description=description)
    check(options)
    return options


def from_file(default: T, path: Path) -> T:
    """``default`` with what a YAML or JSON file says; names as on the command line."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"--config: {path}: {error}") from error
    if not isinstance(found, dict):
        raise SystemExit(f"--config: {path} must hold a mapping of options")
    known = {f.name for f in dataclasses.fields(default)}
    if unknown := sorted(map(str, set(found) - known)):
        raise SystemExit(f"--config: {path}: no such option: {', '.join(unknown)}")
    args = [word for name, value in found.items() for word in _words(name, value)]
    return tyro.cli(type(default), args=args, default=default, prog=str(path))


def _words(name: str, value: Any) -> list[str]:
    """One option of a file as words of a command line, whose types are then checked."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{name.replace('_', '-')}"]
    if isinstance(value, dict):
        return [flag, *(str(x) for pair in value.items() for x in pair)]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def check(options: Options) -> None:
    """Says what is out of range before anything starts."""
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
            "--coordinator, --process-id and --num-processes go together, got "
            f"{', '.join(map(str, manual))}"
        )
    processes = options.num_processes or 1
    if processes < 1 or options.workers % processes:
        raise SystemExit(
            f"--workers: {options.workers} do not split over "
            f"--num-processes {processes}"
        )


def as_text(options: Options) -> str:
    """The options as a file that ``--config`` reads."""
    values = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    values["compress_ratio"] = options.compress_ratio  # JSON's keys are strings
    known = {f.name: f.default for f in dataclasses.fields(options)}
    present = {k: v for k, v in values.items() if v not in (None, []) or known[k]}
    return yaml.safe_dump(present, sort_keys=False)


def check_same_run(options: Options, path: Path) -> None:
    """Raises if the run kept in ``path`` was started with other options."""
    before = yaml.safe_load(path.read_text())
    now = yaml.safe_load(as_text(options))
    names = [n for n in {**before, **now} if before.get(n) != now.get(n)]
    if changed := [n for n in names if n not in FREE]:
        told = ", ".join(f"{n} was {before.get(n)}, is {now.get(n)}" for n in changed)
        raise SystemExit(f"--out: {path.parent} holds a run with other options: {told}")
