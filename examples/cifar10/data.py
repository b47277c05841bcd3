"""CIFAR-10 from the archive of its binary version: no pickles, all of it checked."""

import hashlib
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from examples.common.inputs import Example, Source, examples_of

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
ARCHIVE, FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as it stands on the page
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)
RECORD = 1 + 3 * 32 * 32  # bytes: a label, then red, green and blue, each by rows
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)


def load(folder: Path, md5: str = MD5) -> tuple[Source, Source]:
    """The 50,000 images to train on and the 10,000 to test on."""
    path = folder / ARCHIVE
    if not path.is_file():
        raise SystemExit(
            f"--data-dir: there is no {path}. Download {ARCHIVE} (170 MB) from {PAGE} "
            f"and put it into {folder} as it is, packed."
        )
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != md5:
        raise SystemExit(
            f"--data-dir: {path} has {path.stat().st_size} bytes and MD5 {found}, not "
            f"{md5}: a download cut short, or another version than the binary one"
        )
    with tarfile.open(path) as packed:
        return _read(packed, TRAIN), _read(packed, TEST)


def _read(packed: tarfile.TarFile, names: Iterable[str]) -> Source:
    files = [packed.extractfile(f"{FOLDER}/{name}") for name in names]
    content = b"".join(file.read() for file in files if file is not None)
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    planes = records[:, 1:].reshape(-1, 3, 32, 32)
    labels = records[:, 0].astype(np.int32)
    images = examples_of(image=planes.transpose(0, 2, 3, 1), label=labels)

    def normalized(example: Example) -> Example:
        """Bytes in memory, turned to floats when an example is taken."""
        image = (example["image"].astype(np.float32) / 255 - MEAN) / DEVIATION
        return {**example, "image": image}

    return images.map(normalized)
