"""Reports of a run: JSON lines, TensorBoard, a progress bar."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from rich.progress import MofNCompleteColumn, Progress
from tensorboardX import SummaryWriter

LINE_SECONDS = 10.0  # between lines of progress where the output is no terminal
Write = Callable[[int, Mapping[str, float]], None]


@contextmanager
def records(folder: Path, step: int) -> Iterator[Write]:
    """A function of a step and its numbers, which process 0 writes.

    To ``metrics.jsonl`` and for TensorBoard. A run that resumes at ``step`` drops the
    records of later steps.
    """
    if jax.process_index():
        yield lambda step, metrics: None
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    kept = [r for r in read(path) if r["step"] <= step] if path.exists() else []
    board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
    with path.open("w", buffering=1) as file, board:
        file.writelines(json.dumps(record) + "\n" for record in kept)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
            for name, value in metrics.items():
                board.add_scalar(name, value, step)

        yield write


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
    columns = *Progress.get_default_columns(), MofNCompleteColumn()
    bars = Progress(*columns, "{task.fields[note]}", disable=quiet)
    in_lines = not (quiet or bars.console.is_terminal)
    bars.disable = quiet or in_lines
    bar, told = bars.add_task(name, completed=start, total=steps, note=""), time.time()

    def show(step: int, note: str) -> None:
        nonlocal told
        bars.update(bar, completed=step, note=note)
        if in_lines and (step == steps or time.time() - told >= LINE_SECONDS):
            print(f"{name}  {step}/{steps}  {note}".rstrip(), flush=True)
            told = time.time()

    with bars:
        yield show
