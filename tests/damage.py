"""What may happen to the files of a checkpoint whose ``extra`` has a position 1120."""

import json
import shutil
from pathlib import Path

from slamb_jax.checkpoint.format import with_checksum


def changing(pattern, change):
    def damage(directory):
        for file in filter(Path.is_file, directory.glob(pattern)):
            file.write_bytes(change(file.read_bytes()))

    return damage


def flip(raw):
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 0x10]) + raw[middle + 1 :]


def lie(raw):
    """The arrays are sound, and are not those that were saved."""
    metadata = json.loads(raw)
    max(metadata["checksums"].values(), key=len)[-1][0] ^= 1
    return json.dumps(with_checksum(metadata)).encode()


def mislead(raw):
    """Another digit in a number of the user's."""
    assert b'"position": 1120' in raw
    return raw.replace(b'"position": 1120', b'"position": 9120')


def tear(raw):
    return raw[: len(raw) // 2]


ARRAYS, METADATA = "state/**/d/*", "about/metadata"
DAMAGE = {
    "flip": changing(ARRAYS, flip),
    "truncate": changing(ARRAYS, tear),
    "remove": lambda directory: shutil.rmtree(directory / "state"),
    "foreign": lambda directory: shutil.rmtree(directory / "about"),
    "lie": changing(METADATA, lie),
    "mislead": changing(METADATA, mislead),
    "garble": changing(METADATA, lambda raw: b"{"),
    "empty": changing(METADATA, lambda raw: b"null"),
}
