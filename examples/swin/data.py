"""ImageNet from folders, one for each class: decoded, cropped and normalized."""

from pathlib import Path

import grain
import numpy as np
from PIL import Image

from examples.common.inputs import Augment, Example, Source

SUFFIXES = {".jpeg", ".jpg", ".png", ".webp"}
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
MARGIN = 224 / 256  # of a test image's shorter side: the side of its crop


def image_folder(folder: Path, size: int | None, classes: int) -> Source:
    """``folder/CLASS/*.JPEG``; classes are numbered as their names sort.

    With ``size`` images come resized, cropped in the middle and normalized; without,
    as they are, for :func:`augmenting`.
    """
    if not folder.is_dir():
        raise SystemExit(
            f"--data-dir: there is no {folder}; wanted are train/ and val/ with a "
            "folder of images for each class"
        )
    names = sorted(p.name for p in folder.iterdir() if p.is_dir())
    files = [
        (path, np.int32(label))
        for label, name in enumerate(names)
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]
    if not files:
        raise SystemExit(f"--data-dir: there are no images below {folder}")
    if len(names) != classes:
        found = f"{len(names)} classes below {folder}"
        raise SystemExit(f"--data-dir: {found}, --classes {classes}")

    def read(file: tuple[Path, np.ndarray]) -> Example:
        path, label = file
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        pixels = normalized(centre(image, size)) if size else np.asarray(image)
        return {"image": pixels, "label": label}

    return grain.MapDataset.source(files).map(read)


def load(folder: Path, size: int, classes: int) -> tuple[Source, Source]:
    """The images to train on, and those to test on."""
    train, test = ((folder / "train", None), (folder / "val", size))
    return image_folder(*train, classes), image_folder(*test, classes)


def centre(image: Image.Image, size: int) -> Image.Image:
    """The middle of an image, its margins left out."""
    side = min(image.size) * MARGIN
    left, top = ((length - side) / 2 for length in image.size)
    box = (left, top, left + side, top + side)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box)


def normalized(image: Image.Image) -> np.ndarray:
    """Floats of about mean 0 and deviation 1."""
    pixels: np.ndarray = (np.asarray(image, np.float32) / 255 - MEAN) / DEVIATION
    return pixels


def augmenting(size: int) -> Augment:
    """A random part of the image, 8 to 100 % of it, resized; half of them mirrored."""

    def augment(example: Example, rng: np.random.Generator) -> Example:
        image = Image.fromarray(example["image"])
        box = part(image.size, rng)
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
        pixels = normalized(image)
        if rng.random() < 0.5:
            pixels = np.ascontiguousarray(pixels[:, ::-1])
        return {**example, "image": pixels}

    return augment


def part(
    size: tuple[int, int], rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """A box of random area, shape (3:4 to 4:3) and place; else the largest square."""
    width, height = size
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        shape = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        w, h = np.sqrt(area * shape), np.sqrt(area / shape)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(size)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
