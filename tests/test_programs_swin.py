"""The Swin program: its windows, its images, its sizes, one step, a short run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import slamb_jax
from examples.swin import data, models, train
from tests import programs

TINY = {"width": 8, "depths": (1, 1), "heads": (1, 2), "batch_size": 2, "workers": 2}
TINY |= {"epochs": 2 * 4 / 1438, "learning_rate": 0.01, "log_every": 1}
standard = programs.standard


def test_windows_are_cut_and_joined():
    x = jnp.arange(2 * 6 * 4 * 3).reshape(2, 6, 4, 3)
    windows = models.cut(x, 2)
    assert windows.shape == (2, 6, 4, 3)
    np.testing.assert_array_equal(windows[1, 3], x[1, 2:4, 2:4].reshape(4, 3))
    np.testing.assert_array_equal(models.join(windows, 2, 6, 4), x)


def test_bias_depends_on_where_tokens_are_to_each_other():
    row, at = models.places(3), [(i, j) for i in range(3) for j in range(3)]
    seen = {}
    for a, (i, j) in enumerate(at):
        for b, (k, m) in enumerate(at):
            assert seen.setdefault((i - k, j - m), row[a, b]) == row[a, b]
    assert sorted(seen.values()) == list(range(25))


def window_of(at, window, shift):
    """The number of the window along one side, where the first is cut short."""
    return (at + window - shift) // window if shift else at // window


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_tokens_see_their_window_and_nothing_else(shift):
    block = models.Block(2, 4, shift, 0.0, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (1, 8, 8, 4))
    params = block.init(jax.random.key(1), x, train=False)
    changed = x.at[0, 3, 6, 0].add(1.0)  # all channels alike the norm would undo
    before, after = (block.apply(params, y, train=False) for y in (x, changed))
    moved = np.abs(np.asarray(after - before)).max(-1)[0] > 1e-6
    side = [window_of(np.arange(8), 4, shift) == window_of(a, 4, shift) for a in (3, 6)]
    np.testing.assert_array_equal(moved, np.outer(*side))


def test_drop_path_leaves_a_block_out():
    block = models.Block(2, 4, 0, 1.0, jnp.float32)
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 4))
    params = block.init(jax.random.key(1), x, train=False)
    rngs = {"dropout": jax.random.key(2)}
    np.testing.assert_array_equal(block.apply(params, x, train=True, rngs=rngs), x)
    assert jnp.abs(block.apply(params, x, train=False) - x).max() > 1e-3


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"window": 3}, "windows of 3 tokens in stage 0"),
        ({"heads": (2,)}, "heads must"),
    ],
)
def test_sizes_that_do_not_fit(changes, told):
    sizes = {"window": 4, "heads": (2, 4)} | changes
    model = models.Swin(10, 1, width=8, depths=(2, 2), drop_path=0.0, **sizes)
    with pytest.raises(ValueError, match=told):
        model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)


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
    augment = data.Augmenting(32)
    for i in range(6):
        example = train_on[i]
        assert example["label"] == i // 2
        assert example["image"].shape == (40 + 10 * (i % 2), 60, 3)
        moved = augment(example, np.random.default_rng(i))
        for image in (moved["image"], test_on[i]["image"]):
            assert image.shape == (32, 32, 3)
            assert image.dtype == np.float32
            want = (80 * (i // 2) / 255 - data.MEAN) / data.DEVIATION
            np.testing.assert_allclose(image, np.broadcast_to(want, image.shape), 1e-4)


def test_folders_that_are_missing(tmp_path):
    with pytest.raises(SystemExit, match="wanted are train/ and val/"):
        data.load(tmp_path, 32, 3)
    (tmp_path / "train").mkdir()
    with pytest.raises(SystemExit, match="no images below"):
        data.load(tmp_path, 32, 3)
    with pytest.raises(SystemExit, match="3 classes in train and 3 in val"):
        data.load(folder_of_images(tmp_path / "whole"), 32, 4)


def test_digits_have_one_size():
    with pytest.raises(SystemExit, match="8 x 8 pixels, got 16"):
        train.sources(train.Config(image_size=16))


def test_parts_lie_inside():
    rng = np.random.default_rng(0)
    boxes = np.array([data.part((300, 200), rng) for _ in range(500)])
    assert boxes[:, :2].min() >= 0
    assert boxes[:, 2].max() <= 300
    assert boxes[:, 3].max() <= 200
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    share = width * height / 60_000
    assert 0.079 < share.min() < 0.15
    assert share.max() > 0.7
    assert 0.74 < (width / height).min() < (width / height).max() < 1.34
    assert data.part((1000, 10), rng) == (495, 0, 505, 10)  # nothing else fits


@pytest.mark.long
def test_one_step(tmp_path):
    smaller = {"depths": (1,), "heads": (1,), "exchange": slamb_jax.Exchange("data")}
    config = train.Config(**TINY | smaller, warmup_epochs=0, out=tmp_path)
    before, after, metrics = programs.one_step(
        train.task(config, programs.digits()), config
    )
    assert np.isfinite(metrics["loss"]).all()
    bias = after.params["Conv_0"]["kernel"]
    assert not np.allclose(bias[0], before.params["Conv_0"]["kernel"])


@pytest.mark.long
def test_a_short_run(tmp_path):
    config = train.Config(**TINY, warmup_epochs=4 / 1438, out=tmp_path / "run")
    result = programs.train(train.task(config, programs.digits()), config)
    assert result.step == 2
    assert 0 < result.bytes_sent < result.dense_bytes
    rates = programs.series(tmp_path / "run", "learning_rate")
    assert rates == pytest.approx([0, 0.01])
    assert np.isfinite(programs.series(tmp_path / "run", "loss")).all()
    assert programs.series(tmp_path / "run", "replica_spread")[-1] > 0


def test_the_authors_settings():
    config = programs.config_of(train, "base")
    assert (config.b3, config.eps, config.clip_norm) == (0.999, 1e-8, 1.0)
    assert config.exchange == slamb_jax.Exchange(
        "data", compress_ratio=0.1, min_size=9000, sync_every=100
    )
    task = train.task(config, train.blank(config))
    assert task.steps == round(300 * 1_281_167 / 16_384)
    warm = 20 * 1_281_167 / 16_384
    assert float(task.schedule(round(warm))) == pytest.approx(5.656e-3, rel=1e-5)
    assert float(task.schedule(round(warm / 2))) == pytest.approx(2.828e-3, rel=1e-3)


@pytest.mark.long
def test_kernels_decay():
    config = train.Config()
    task = train.task(config, train.sources(config))
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    decays = task.decay_mask(params)["Block_0"]
    attention = decays["WindowAttention_0"]
    assert attention["query"] == {"kernel": True, "bias": False}
    assert attention["relative_position_bias"] is False
    assert decays["LayerNorm_0"]["scale"] is False
