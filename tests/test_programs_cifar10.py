"""The ResNet program: its archive, its images, its sizes, short runs."""

import hashlib
import io
import signal
import tarfile

import jax
import numpy as np
import pytest

import slamb_jax
from examples.cifar10 import data, main
from examples.cifar10.models import ResNet
from examples.common import processes
from tests import programs

TINY = {"width": 4, "batch_size": 2, "workers": 2, "learning_rate": 0.01}
TINY |= {"log_every": 1, "eval_every": 3, "checkpoint_every": 100}
TINY |= {"epochs": 4 * programs.EPOCH, "milestones": (2 * programs.EPOCH,)}
pytestmark = pytest.mark.usefixtures("standard_promotion", "quick_to_compile")


def run(out, **changes):
    return programs.train(main, main.Config(**{**TINY, "out": out, **changes}))


def archive_in(folder, count=20):
    rng = np.random.default_rng(0)
    written = {}
    path = folder / data.ARCHIVE
    with tarfile.open(path, "w:gz") as packed:
        for name in (*data.TRAIN, *data.TEST):
            written[name] = rng.integers(0, 10, (count, data.RECORD), np.uint8)
            entry = tarfile.TarInfo(f"{data.FOLDER}/{name}")
            entry.size = written[name].size
            packed.addfile(entry, io.BytesIO(written[name].tobytes()))
    return hashlib.md5(path.read_bytes()).hexdigest(), written


def test_archive_is_read_and_checked(tmp_path):
    md5, written = archive_in(tmp_path)
    train_on, test_on = data.load(tmp_path, md5)
    assert (len(train_on), len(test_on)) == (100, 20)
    record, example = written["data_batch_2.bin"][3], train_on[23]
    assert example["label"] == record[0]
    red = record[1 : 1 + 1024].reshape(32, 32)  # the first plane, by rows
    want = (red / 255 - data.MEAN[0]) / data.DEVIATION[0]
    np.testing.assert_allclose(example["image"][..., 0], want, rtol=1e-5, atol=1e-6)
    for folder, told in (
        (tmp_path, "MD5 .*, not c32a1d4ab5d03f.*: a download cut short"),
        (tmp_path / "none", "Download cifar-10-binary.tar.gz"),
    ):
        with pytest.raises(SystemExit, match=told):
            data.load(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "exchange", "room"),
    [
        ("adamw", slamb_jax.Exchange("data"), 1e-4),
        # Its workers step by themselves from one average to the next.
        ("slamb", slamb_jax.Exchange.paper("data"), 0.1),
    ],
)
def test_an_optimizer_trains(name, exchange, room, tmp_path):
    """What resumes to the last bit is in ``test_programs_launch.py``."""
    before = signal.getsignal(signal.SIGINT)
    made = {"exchange": exchange, "optimizer": name}
    result = run(tmp_path, **made)
    assert signal.getsignal(signal.SIGINT) is before
    losses = programs.series(tmp_path, "loss")
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    rates = programs.series(tmp_path, "learning_rate")
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
    _, arrays = programs.saved(tmp_path / "checkpoints")
    params = [x for key, x in arrays.items() if key.startswith(".params")]
    apart = sum(np.sum((x - x.mean(0)) ** 2) for x in params) ** 0.5
    assert apart < room * sum(np.sum(x**2) for x in params) ** 0.5
    mean = arrays[".statistics['BatchNorm_0']['mean']"]
    assert not np.allclose(mean[0], mean[1])  # each worker has its own statistics
    (share,) = {*programs.series(tmp_path, "exchange/share_of_float32")}
    assert 0 < share < 1
    scores = {name: x for name, x in result.items() if name.startswith("eval_")}
    assert run(tmp_path, **made) == scores  # finished: evaluated, and not made again
    with pytest.raises(SystemExit, match="other options"):
        run(tmp_path, **made, b2=0.5)


def test_runs_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--epochs: not one step"):
        run(tmp_path, epochs=programs.EPOCH / 4)
    with pytest.raises(ValueError, match=r"6 n \+ 2, n >= 1, got 9"):
        ResNet(9).init(jax.random.key(0), np.zeros((1, 8, 8, 1)), train=False)
    with pytest.raises(SystemExit, match="--workers: 1000 asked for"):
        processes.mesh_of(1000)
