"""The ResNet program: its archive, its images, its sizes, short runs."""

import dataclasses
import hashlib
import io
import os
import signal
import tarfile

import jax
import numpy as np
import pytest

import slamb_jax
from examples.cifar10 import data, train
from examples.cifar10.models import ResNet
from examples.common import images, loop, options, processes, records
from examples.common.optimizers import KINDS
from tests import programs
from tests.close import assert_same_bits

TINY = {"width": 4, "batch_size": 2, "workers": 2, "learning_rate": 0.01}
TINY |= {"log_every": 1, "eval_every": 3, "checkpoint_every": 100}
TINY |= {"epochs": 4 * programs.EPOCH, "milestones": (2 * programs.EPOCH,)}
LOCAL = slamb_jax.Exchange("data", payload=None, sync_every=3)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def run(out, **changes):
    config = train.Config(**{**TINY, "out": out, "exchange": LOCAL, **changes})
    return programs.train(train, config)


def archive_in(folder, count=20):
    rng = np.random.default_rng(0)
    written = {}
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name in (*data.TRAIN, *data.TEST):
            written[name] = rng.integers(0, 10, (count, data.RECORD), np.uint8)
            entry = tarfile.TarInfo(f"{data.FOLDER}/{name}")
            entry.size = written[name].size
            packed.addfile(entry, io.BytesIO(written[name].tobytes()))
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    return data.Archive(size=path.stat().st_size, md5=md5, records=count), written


def test_archive_is_read_and_checked(tmp_path):
    known, written = archive_in(tmp_path)
    train_on, test_on = data.load(tmp_path, known)
    assert (len(train_on), len(test_on)) == (100, 20)
    record, example = written["data_batch_2.bin"][3], train_on[23]
    assert example["label"] == record[0]
    red = record[1 : 1 + 1024].reshape(32, 32)  # the first plane, by rows
    want = (red / 255 - data.MEAN[0]) / data.DEVIATION[0]
    np.testing.assert_allclose(example["image"][..., 0], want, rtol=1e-5, atol=1e-6)
    for changes, told in (
        ({"size": 5}, "bytes, not 5"),
        ({"md5": "0" * 32}, "has MD5"),
        ({"records": 21}, "data_batch_1.bin has"),
        ({"name": "other.tar.gz"}, "Download other.tar.gz"),
    ):
        with pytest.raises(SystemExit, match=told):
            data.load(tmp_path, dataclasses.replace(known, **changes))


def test_augmentation_keeps_shape_and_pixels():
    rng = np.random.default_rng(0)
    image = np.arange(64, dtype=np.float32).reshape(8, 8, 1)
    augment = images.shifted(1, flip=True)
    moved = [augment({"image": image}, rng)["image"] for _ in range(50)]
    assert {(x.shape, x.dtype) for x in moved} == {(image.shape, image.dtype)}
    assert len({x.tobytes() for x in moved}) == 18  # 3 x 3 places, mirrored


@pytest.mark.long
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_each_optimizer_trains(name, dense, tmp_path):
    short = {"epochs": 2 * programs.EPOCH, "eval_every": 2, "optimizer": name}
    between = options.EXCHANGE.axis_name
    exchange = {
        "slamb": slamb_jax.Exchange.paper(between),
        "muon": slamb_jax.Exchange(between, payload="uniform8"),
    }.get(name, options.EXCHANGE)
    result = run(tmp_path, dense=dense, exchange=exchange, **short)
    assert result.step == 2
    assert np.isfinite(programs.series(tmp_path, "loss")).all()
    # SLAMB's workers step by themselves from one average to the next.
    room = 0.1 if name == "slamb" and not dense else 1e-4
    assert programs.series(tmp_path, "replica_spread")[0] < room
    assert (0 < result.bytes_sent < result.dense_bytes) == (not dense)
    assert not dense or result.bytes_sent == result.dense_bytes > 0
    assert bool(programs.series(tmp_path, "trust_ratio")[0]) == (
        name in ("lamb", "slamb")
    )


def left_by(out):
    """The newest checkpoint's arrays, where its data stood, and records but seconds."""
    with slamb_jax.Checkpoints(out / "checkpoints") as checkpoints:
        metadata, arrays = checkpoints.load(checkpoints.latest())
    numbers = records.read(out / "metrics.jsonl")
    for record in numbers:
        record.pop("steps_per_second", None)
    return arrays, metadata["extra"], numbers


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_resumes_to_the_last_bit(number, tmp_path, monkeypatch):
    before, out = signal.getsignal(signal.SIGINT), tmp_path / "parts"
    whole, one_step = run(tmp_path / "one"), loop._Loop.one_step

    def and_stop(self, state, stream, t):
        if t == 2:
            os.kill(os.getpid(), number)
        return one_step(self, state, stream, t)

    monkeypatch.setattr(loop._Loop, "one_step", and_stop)
    with pytest.raises(SystemExit) as stopped:
        run(out)
    monkeypatch.undo()
    assert stopped.value.code == 128 + number
    assert signal.getsignal(signal.SIGINT) is before
    assert not (out / "result.json").exists()
    with pytest.raises(SystemExit, match="other options"):
        run(out, b2=0.5)
    result = run(out)
    (arrays, position, numbers), (want, _, same) = map(left_by, (out, tmp_path / "one"))
    assert_same_bits(arrays, want)
    assert position == {"next_index": 4, "workers": TINY["workers"]}
    assert (result.metrics, numbers) == (whole.metrics, same)
    mean = arrays[".kept['BatchNorm_0']['mean']"]
    assert not np.allclose(mean[0], mean[1])  # each worker has its own statistics
    assert run(out) == result  # finished: not made again

    assert result.step == 4
    assert 0 < result.bytes_sent < result.dense_bytes
    assert 0 <= result.metrics["eval_accuracy"] <= 100
    assert len(programs.series(out, "loss")) == 4
    assert np.isfinite(programs.series(out, "loss")).all()
    rates = programs.series(out, "learning_rate")
    assert rates == pytest.approx([0.01, 0.01, 0.001, 0.001])
    assert len(programs.series(out, "eval_loss")) == 2
    assert programs.series(out, "replica_spread")[0] > 1e-4
    assert list((out / "tensorboard").glob("events*"))


def test_runs_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--epochs: not one step"):
        run(tmp_path, epochs=programs.EPOCH / 4)
    with pytest.raises(ValueError, match=r"6 n \+ 2, n >= 1, got 9"):
        ResNet(9).init(jax.random.key(0), np.zeros((1, 8, 8, 1)), train=False)
    with pytest.raises(SystemExit, match="--workers: 1000 asked for"):
        processes.mesh_of(1000)
