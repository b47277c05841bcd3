"""The programs of Swin and BERT: what their models see, their images and text, runs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from examples.bert import data as text
from examples.bert import main as bert
from examples.swin import data, main, models
from tests import programs

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_bias_depends_on_where_tokens_are_to_each_other():
    row, at = models.places(3), [(i, j) for i in range(3) for j in range(3)]
    seen = {}
    for a, (i, j) in enumerate(at):
        for b, (k, m) in enumerate(at):
            assert seen.setdefault((i - k, j - m), row[a, b]) == row[a, b]
    assert sorted(seen.values()) == list(range(25))


def block_of(shift, drop_path, *shape):
    block = models.Block(2, 4, shift, drop_path, jnp.float32)
    x = jax.random.normal(jax.random.key(0), shape)
    return block, x, block.init(jax.random.key(1), x, train=False)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_tokens_see_their_window_and_nothing_else(shift):
    block, x, params = block_of(shift, 0.0, 1, 8, 12, 4)
    changed = x.at[0, 3, 6, 0].add(1.0)  # all channels alike the norm would undo
    before, after = (block.apply(params, y, train=False) for y in (x, changed))
    moved = np.abs(np.asarray(after - before)).max(-1)[0] > 1e-6
    first = shift or 4  # the length of the first window along a side
    rows, columns = (
        (np.arange(n) - first) // 4 == (a - first) // 4 for n, a in ((8, 3), (12, 6))
    )
    np.testing.assert_array_equal(moved, np.outer(rows, columns))


def test_drop_path_leaves_a_block_out():
    block, x, params = block_of(0, 1.0, 2, 4, 4, 4)
    rngs = {"dropout": jax.random.key(2)}
    np.testing.assert_array_equal(block.apply(params, x, train=True, rngs=rngs), x)
    assert jnp.abs(block.apply(params, x, train=False) - x).max() > 1e-3


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
        example = train_on[i]
        assert example["label"] == i // 2
        assert example["image"].shape == (40 + 10 * (i % 2), 60, 3)
        moved = data.augmenting(32)(example, np.random.default_rng(i))
        want = np.broadcast_to(
            (80 * (i // 2) / 255 - data.MEAN) / data.DEVIATION, (32, 32, 3)
        )
        for image in (moved["image"], test_on[i]["image"]):
            assert image.dtype == np.float32
            np.testing.assert_allclose(image, want, 1e-4)


def test_folders_and_sizes_that_do_not_fit(tmp_path):
    with pytest.raises(SystemExit, match="wanted are train/ and val/"):
        data.load(tmp_path, 32, 3)
    (tmp_path / "train").mkdir()
    with pytest.raises(SystemExit, match="no images below"):
        data.load(tmp_path, 32, 3)
    with pytest.raises(SystemExit, match=r"3 classes below .*train, --classes 4"):
        data.load(folder_of_images(tmp_path / "whole"), 32, 4)
    for window, heads, told in (
        (3, (2, 4), "windows of 3 tokens in stage 0"),
        (4, (2,), "heads must"),
    ):
        sizes = {"width": 8, "depths": (2, 2), "window": window, "heads": heads}
        model = models.Swin(10, 1, drop_path=0.0, **sizes)
        with pytest.raises(ValueError, match=told):
            model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)


def test_parts_lie_inside():
    rng = np.random.default_rng(0)
    boxes = np.array([data.part((300, 200), rng) for _ in range(500)])
    assert boxes[:, :2].min() >= 0
    assert (boxes[:, 2:].max(0) <= (300, 200)).all()
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    share = width * height / 60_000
    assert 0.079 < share.min() < 0.15
    assert share.max() > 0.7
    assert 0.74 < (width / height).min() < (width / height).max() < 1.34
    assert data.part((1000, 10), rng) == (495, 0, 505, 10)  # nothing else fits


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
        elsewhere = np.delete(np.arange(126 + 2), at)
        np.testing.assert_array_equal(found["tokens"][elsewhere], sequence[elsewhere])
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


def test_too_little_text(tmp_path):
    tokens, paths = tmp_path / "tokens", []
    for name, told in (
        ("one", "at least two files are needed, got 1"),
        ("two", "are too few for sequences of 16"),
    ):
        paths.append(tmp_path / name)
        paths[-1].write_text(name)
        with pytest.raises(SystemExit, match=told):
            text.load(paths, tokens, 120, 16)
    assert len(list(tokens.iterdir())) == 1  # nothing half made


@pytest.mark.long
def test_products_are_bfloat16():
    sizes = {"vocabulary": 120, "layers": 1, "width": 16, "heads": 2, "length": 16}
    config = bert.Config(**sizes, dtype="bfloat16")
    row = text.sequences(np.zeros(100, np.uint16), 16)
    task = bert.task(config, [text.masked(row, 120)] * 2)
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: x[None], task.source[0])
    jaxpr = jax.make_jaxpr(task.scores)(params, {}, batch, jax.random.key(0))
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert {e.outvars[0].aval.dtype for e in dots} == {jnp.dtype(jnp.bfloat16)}
