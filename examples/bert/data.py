"""Text as WordPiece tokens in files, and sequences of them with some masked."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grain
import jax
import numpy as np
from jax.experimental import multihost_utils
from tokenizers import BertWordPieceTokenizer

from examples.byte_lm.data import EVERY_HELD_OUT, standard_library, text_files
from examples.common.inputs import Example, Source

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # tokens 0 to 4
CLS, SEP, MASK = 2, 3, 4
PARTS = ("training", "held_out")
MASKED = 0.15  # of a sequence's tokens
FILES_AT_ONCE = 64


def sequences(tokens: np.ndarray, length: int) -> Source:
    """``[CLS] tokens [SEP]`` of one length, cut from a long row of tokens."""
    inside = length - 2

    def cut(index: int) -> Example:
        part = tokens[index * inside : (index + 1) * inside]
        return {"tokens": np.concatenate([[CLS], part, [SEP]]).astype(np.int32)}

    return grain.MapDataset.range(len(tokens) // inside).map(cut)


def masked(examples: Source, vocabulary: int) -> Source:
    """The same sequences, each masked once and for all."""
    mask = masking(vocabulary)
    return examples.map_with_index(lambda i, x: mask(x, np.random.default_rng(i)))


def masking(vocabulary: int) -> Callable[[Example, np.random.Generator], Example]:
    """BERT's: of 15 % of the tokens, 80 % hidden, 10 % another, 10 % as they are.

    Always the same number of a sequence, so that shapes are static.
    """

    def mask(example: Example, rng: np.random.Generator) -> Example:
        tokens = example["tokens"].copy()
        inside = len(tokens) - 2
        chosen = rng.permutation(inside)[: max(1, round(MASKED * inside))] + 1
        chosen = np.sort(chosen).astype(np.int32)
        labels = tokens[chosen]
        others = rng.integers(len(SPECIAL), vocabulary, len(chosen), np.int32)
        lot = rng.random(len(chosen))
        shown = np.where(lot < 0.9, others, labels)
        tokens[chosen] = np.where(lot < 0.8, np.int32(MASK), shown)
        return {"tokens": tokens, "positions": chosen, "labels": labels}

    return mask


def load(
    files: Sequence[Path], cache: Path, vocabulary: int, length: int
) -> tuple[Source, Source]:
    """Sequences to train on and, from every twentieth file, to evaluate on.

    Process 0 trains the tokenizer and writes the tokens below ``cache``, which all
    processes must see; later runs with the same files find them there.
    """
    found = text_files(files) if files else standard_library()
    state = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in found]
    name = hashlib.sha256(json.dumps([state, vocabulary]).encode()).hexdigest()[:16]
    folder = cache / name
    if jax.process_index() == 0 and not folder.exists():
        _prepare(found, folder, vocabulary)
    multihost_utils.sync_global_devices("tokens")
    parts = [np.load(folder / f"{part}.npy", mmap_mode="r") for part in PARTS]
    for part, tokens in zip(PARTS, parts, strict=True):
        if len(tokens) < length:
            raise SystemExit(
                f"--files: {len(tokens)} tokens in the {part} part of {len(found)} "
                f"files are too few for sequences of {length}"
            )
    train, held_out = (sequences(tokens, length) for tokens in parts)
    return train, masked(held_out, vocabulary)


def _prepare(files: Sequence[Path], folder: Path, vocabulary: int) -> None:
    """Trains WordPiece on the files and writes their tokens; whole or not at all."""
    if len(files) < 2:
        raise SystemExit(f"--files: at least two files are needed, got {len(files)}")
    kept = [f for i, f in enumerate(files) if i % EVERY_HELD_OUT]
    parts = kept, files[::EVERY_HELD_OUT]
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        _texts(kept),
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    beside = folder.with_name(f"{folder.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        tokenizer.save(str(beside / "tokenizer.json"))
        for name, part in zip(PARTS, parts, strict=True):
            np.save(beside / f"{name}.npy", _encoded(tokenizer, part))
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def _encoded(tokenizer: BertWordPieceTokenizer, files: Sequence[Path]) -> np.ndarray:
    """All tokens of the files in a row, a separator after each file."""
    small = tokenizer.get_vocab_size() <= 2**16
    rows = []
    for start in range(0, len(files), FILES_AT_ONCE):
        texts = list(_texts(files[start : start + FILES_AT_ONCE]))
        for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
            rows.append(np.array([*encoded.ids, SEP], np.uint16 if small else np.int32))
    return np.concatenate(rows)
