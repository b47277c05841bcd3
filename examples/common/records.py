"""Reports of a run: JSON lines, TensorBoard, a progress bar."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from tensorboardX import SummaryWriter

LINE_SECONDS = 10.0  # between lines of progress where the output is no terminal


class Records:
    """Metrics by step, in ``metrics.jsonl`` and for TensorBoard; process 0 writes.

    A run that resumes at ``step`` drops the records of later steps.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.writer: SummaryWriter | None = None
        if jax.process_index():
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [r for r in read(path) if r["step"] <= step] if path.exists() else []
        self.file = path.open("w", buffering=1)
        for record in kept:
            self.file.write(json.dumps(record) + "\n")
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.writer is not None:
            self.file.close()
            self.writer.close()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Numbers, or mappings of names to numbers."""
        if self.writer is None:
            return
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        for name, value in metrics.items():
            if isinstance(value, dict):
                for part, number in value.items():
                    self.writer.add_scalar(f"{name}/{part}", number, step)
            else:
                self.writer.add_scalar(name, value, step)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; an incomplete last line is left out."""
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


@contextmanager
def progress_bar(
    name: str, start: int, steps: int, *, hidden: bool = False
) -> Iterator[Callable[[int, str], None]]:
    """A function ``(step, note)`` that moves a bar, with the time left.

    Where the output is no terminal, it prints a line every ten seconds, and the last.
    """
    quiet = hidden or jax.process_index() > 0
    columns = (
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(quiet=quiet)
    if not (quiet or console.is_terminal):
        with _lines(name, steps) as show:
            yield show
        return
    with Progress(*columns, console=console, disable=quiet) as bars:
        task = bars.add_task(name, completed=start, total=steps, note="")
        yield lambda step, note: bars.update(task, completed=step, note=note)


@contextmanager
def _lines(name: str, steps: int) -> Iterator[Callable[[int, str], None]]:
    told, waiting = time.monotonic(), ""

    def show(step: int, note: str) -> None:
        nonlocal told, waiting
        waiting = f"{name}  {step}/{steps}  {note}".rstrip()
        if time.monotonic() - told >= LINE_SECONDS:
            print(waiting, flush=True)
            told, waiting = time.monotonic(), ""

    yield show
    if waiting:
        print(waiting, flush=True)
