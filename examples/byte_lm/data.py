"""Bytes of real text: the Python standard library's source, or the user's files."""

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
EVERY_HELD_OUT = 20  # one file in twenty is kept for evaluation


def standard_library(path: str = "stdlib") -> list[Path]:
    """The source files of the running Python's standard library, without tests.

    Or those below another of its paths, by the name that ``sysconfig`` has for it.
    """
    root = Path(sysconfig.get_path(path))
    files = (f for f in root.rglob("*.py") if f.is_file())
    return sorted(f for f in files if not SKIPPED & set(f.relative_to(root).parts))


def installed(most: int) -> list[Path]:
    """The standard library's source, then that of what is installed: so many bytes."""
    kept, total = [], 0
    for path in standard_library() + standard_library("purelib"):
        total += path.stat().st_size
        if total > most:
            break
        kept.append(path)
    return kept


def text_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, and all files below the directories named."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise SystemExit(f"--files: there is no {path}")
        below = path.rglob("*") if path.is_dir() else [path]
        found += sorted(f for f in below if f.is_file())
    return found


def load(files: Sequence[Path], context: int) -> tuple[np.ndarray, np.ndarray]:
    """All bytes of the files, split by file into training and evaluation text."""
    texts = [np.frombuffer(f.read_bytes(), np.uint8) for f in files]
    if len(texts) == 1:  # one file: its last twentieth is held out
        cut = len(texts[0]) - len(texts[0]) // EVERY_HELD_OUT
        texts = [texts[0][cut:], texts[0][:cut]]
    held_out = texts[::EVERY_HELD_OUT]
    kept = [t for i, t in enumerate(texts) if i % EVERY_HELD_OUT]
    parts = [
        np.concatenate(p) if p else np.zeros(0, np.uint8) for p in (kept, held_out)
    ]
    if min(len(p) for p in parts) <= context + 1:
        raise SystemExit(
            f"--files: {sum(map(len, texts))} bytes in {len(files)} files are too few "
            f"to train on sequences of {context} bytes and to hold some out"
        )
    return parts[0], parts[1]


def batches(
    text: np.ndarray, batch: int, context: int, steps: int, seed: int
) -> Iterator[np.ndarray]:
    """``steps`` arrays (batch, context + 1): the same for the same seed."""
    rng = np.random.default_rng(seed)
    window = np.arange(context + 1)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - context, batch)
        yield text[starts[:, None] + window].astype(np.int32)
