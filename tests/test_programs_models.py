"""The programs of Swin and BERT: what their models see, their images and text, runs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from examples.bert import data as text
from examples.swin import data, main, models
from tests import programs

pytestmark = pytest.mark.usefixtures("standard_promotion", "quick_to_compile")


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_tokens_see_their_window_and_nothing_else(shift):
    block = models.Block(2, 4, shift, 0.0, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 8, 12, 4))
    params = block.init(jax.random.key(1), x, train=False)
    changed = x.at[0, 3, 6, 0].add(1.0)  # all channels alike the norm would undo
    before, after = (block.apply(params, y, train=False) for y in (x, changed))
    moved = np.abs(np.asarray(after - before)).max(-1)[0] > 1e-6
    first = shift or 4  # the length of the first window along a side
    rows, columns = (
        (np.arange(n) - first) // 4 == (a - first) // 4 for n, a in ((8, 3), (12, 6))
    )
    np.testing.assert_array_equal(moved, np.outer(rows, columns))


def folder_of_images(folder):
    for part in ("train", "val"):
        for label, name in enumerate(("ant", "bee", "cat")):
            (folder / part / name).mkdir(parents=True)
            for i in range(2):
                pixels = np.full((40 + 10 * i, 60, 3), 80 * label, np.uint8)
                path = folder / part / name / f"{i}.JPEG"
                Image.fromarray(pixels).save(path, format="png")
            (folder / part / name / "notes.txt").write_text("not an image")
    return folder


def test_images_of_a_folder(tmp_path):
    train_on, test_on = data.load(folder_of_images(tmp_path), 32, 3)
    assert (len(train_on), len(test_on)) == (6, 6)
    for i in range(6):
        label, example = i // 2, train_on[i]
        assert example["label"] == label
        assert example["image"].shape == (40 + 10 * (i % 2), 60, 3)
        moved = data.augmenting(32)(example, np.random.default_rng(i))
        color = (80 * label / 255 - data.MEAN) / data.DEVIATION
        for image in (moved["image"], test_on[i]["image"]):
            assert image.dtype == np.float32
            np.testing.assert_allclose(image, np.full((32, 32, 3), color), 1e-4)


def test_folders_and_text_that_do_not_fit(tmp_path):
    with pytest.raises(SystemExit, match="wanted are train/ and val/"):
        data.load(tmp_path, 32, 3)
    with pytest.raises(SystemExit, match=r"3 classes below .*train, --classes 4"):
        data.load(folder_of_images(tmp_path), 32, 4)
    (tmp_path / "one").write_text("one")
    with pytest.raises(SystemExit, match="at least two files are needed, got 1"):
        text.load([tmp_path / "one"], tmp_path / "tokens", 120, 16)


@pytest.mark.long
def test_a_short_run(tmp_path):
    sizes = {"width": 8, "depths": (1, 1), "heads": (1, 2), "batch_size": 2}
    sizes |= {"epochs": 2 * programs.EPOCH, "warmup_epochs": programs.EPOCH}
    settings = {"workers": 2, "log_every": 1, "learning_rate": 0.01, "out": tmp_path}
    result = programs.train(main, main.Config(**sizes, **settings))
    assert 0 < result["exchange/share_of_float32"] < 1
    assert programs.series(tmp_path, "learning_rate") == pytest.approx([0, 0.01])
    assert np.isfinite(programs.series(tmp_path, "loss")).all()


def test_masking():
    sequence = np.array([text.CLS, *range(50, 50 + 126), text.SEP], np.int32)
    rng = np.random.default_rng(0)
    hidden = kept = 0
    for _ in range(400):
        found = text.masking(1000)({"tokens": sequence}, rng)
        at = found["positions"]
        assert len(set(at)) == len(at) == 19  # 15 % of 126
        assert 1 <= at.min() < at.max() <= 126
        np.testing.assert_array_equal(found["labels"], sequence[at])
        assert {*np.flatnonzero(found["tokens"] != sequence)} <= {*at}
        hidden += np.mean(found["tokens"][at] == text.MASK) / 400
        kept += np.mean(found["tokens"][at] == sequence[at]) / 400
    assert (hidden, kept) == pytest.approx((0.8, 0.1), abs=0.02)


def test_text_becomes_sequences_once(tmp_path):
    given = [programs.text_in(tmp_path / "text")], tmp_path / "tokens", 120, 16
    train_on, held_out = text.load(*given)
    parts = [np.load(path) for path in sorted((tmp_path / "tokens").glob("*/*.npy"))]
    # Each word is one token, and a separator is behind each file.
    assert sum(map(len, parts)) == 25 * 61
    first = train_on[0]["tokens"]
    assert (first[0], first[-1], len(first)) == (text.CLS, text.SEP, 16)
    row = np.concatenate([train_on[i]["tokens"][1:-1] for i in range(len(train_on))])
    np.testing.assert_array_equal(row, parts[1][: len(row)])
    chex.assert_trees_all_equal(held_out[3], held_out[3])  # masked once and for all
    before = (tmp_path / "tokens").stat().st_mtime_ns
    text.load(*given)
    assert (tmp_path / "tokens").stat().st_mtime_ns == before
