"""CIFAR-10 from the archive of its binary version: no pickles, all of it checked."""

import dataclasses
import hashlib
import tarfile
from pathlib import Path

import numpy as np

from examples.common.inputs import Arrays, Example

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)
RECORD = 1 + 3 * 32 * 32  # bytes: a label, then red, green and blue, each by rows
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)


@dataclasses.dataclass(frozen=True)
class Archive:
    """Name, size and checksum of a distribution; the MD5 stands on its page."""

    name: str = "cifar-10-binary.tar.gz"
    size: int = 170_052_171
    md5: str = "c32a1d4ab5d03f1284b67883e8d87530"
    records: int = 10_000  # in each of its six files


class Images(Arrays):
    """Bytes in memory, turned to normalized floats when an example is taken."""

    def __getitem__(self, index: int) -> Example:
        found = super().__getitem__(index)
        image = (found["image"].astype(np.float32) / 255 - MEAN) / DEVIATION
        return {"image": image, "label": found["label"]}


def load(folder: Path, archive: Archive = Archive()) -> tuple[Images, Images]:
    """The 50,000 images to train on and the 10,000 to test on."""
    path = folder / archive.name
    if not path.is_file():
        raise SystemExit(
            f"--data-dir: there is no {path}. Download {archive.name} (170 MB) from "
            f"{PAGE} and put it into {folder} as it is, packed."
        )
    check(path, archive)
    with tarfile.open(path) as packed:
        return _read(packed, TRAIN, archive), _read(packed, TEST, archive)


def check(path: Path, archive: Archive) -> None:
    """Raises unless size and checksum are those of the distribution."""
    size = path.stat().st_size
    if size != archive.size:
        raise SystemExit(
            f"--data-dir: {path} has {size} bytes, not {archive.size}: a download cut "
            f"short, or another version than the binary one"
        )
    with path.open("rb") as file:
        md5 = hashlib.file_digest(file, "md5").hexdigest()
    if md5 != archive.md5:
        raise SystemExit(f"--data-dir: {path} has MD5 {md5}, not {archive.md5}")


def _read(packed: tarfile.TarFile, names: tuple[str, ...], archive: Archive) -> Images:
    parts = []
    for name in names:
        file = packed.extractfile(f"{FOLDER}/{name}")
        content = b"" if file is None else file.read()
        if len(content) != archive.records * RECORD:
            raise SystemExit(f"--data-dir: {name} has {len(content)} bytes")
        parts.append(np.frombuffer(content, np.uint8).reshape(-1, RECORD))
    records = np.concatenate(parts)
    labels = records[:, 0].astype(np.int32)
    if labels.max() > 9:
        raise SystemExit(f"--data-dir: a label is {labels.max()}, not one of 0 to 9")
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    return Images(image=planes.transpose(0, 2, 3, 1), label=labels)
