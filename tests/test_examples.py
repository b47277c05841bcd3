"""The programs and the README's code run as a user runs them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import choices
from examples.byte_lm import data
from slamb_jax import recipes

ROOT = Path(__file__).parents[1]


def run(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


TINY = {"steps": 2, "evaluations": 2, "batch": 1, "context": 16, "layers": 1}
TINY |= {"width": 16, "heads": 2, "eval-batch": 8, "min-size": 100}


def test_a_choices_bytes_have_averages_as_often_as_it_makes_them():
    for name in ("FLOAT32", "FEW_BYTES", "LARGE_BATCH", "NOISY"):
        job = choices.main_job(choices.Config(), choices.CHOICES[f"recipe {name}"])
        assert job.sync_every == getattr(recipes, name)["sync_every"]
    rest = choices.main_job(choices.Config(steps=7), choices.CHOICES["top-k"])
    assert rest == choices.train.Config(steps=7)


def test_main_job(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_bytes(bytes(range(32, 127)) * 2)
    out = tmp_path / "out"
    tiny = [f"--{name}={value}" for name, value in TINY.items()]
    done = run(
        "-m", "examples.byte_lm.main", *tiny, "--files", str(text), "--out", str(out)
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "SLAMB" in done.stdout
    dense, slamb = json.loads((out / "results.json").read_text())
    assert dense["steps"] == slamb["steps"] == [1, 2]
    assert all(np.isfinite(dense["losses"] + slamb["losses"]))
    assert slamb["bytes_per_step"] < 0.5 * dense["bytes_per_step"]
    assert (out / "curves.png").stat().st_size > 10_000


@pytest.mark.long
def test_main_job_with_jointspar(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 90)
    tiny = [f"--{name}={value}" for name, value in (TINY | {"layers": 2}).items()]
    done = run(
        "-m", "examples.byte_lm.main", *tiny, "--optimizer", "lars", "jointspar_lars",
        "--budget", "1", "--p-min", "0.2", "--files", str(tmp_path / "text"),
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    dense, sparse = json.loads((tmp_path / "out" / "results.json").read_text())
    assert dense["blocks"] is None
    blocks = sparse["blocks"]
    assert (blocks["budget"], blocks["p_min"]) == (1.0, 0.2)
    pairs = list(zip(*blocks["probabilities"].values(), strict=True))
    assert len(pairs) == 2
    assert all(abs(sum(p) - 1) < 1e-5 for p in pairs)
    assert sparse["bytes_per_step"] <= dense["bytes_per_step"] * 1.01
    assert "budget 1 of 2 blocks, p_min 0.2" in done.stdout
    assert (tmp_path / "out" / "blocks.png").stat().st_size > 5_000


def test_the_job_says_what_is_wrong_with_its_files(tmp_path):
    done = run("-m", "examples.byte_lm.main", "--files", str(tmp_path / "none"))
    assert done.returncode != 0
    assert "there is no" in done.stderr
    (tmp_path / "short").write_bytes(b"too short")
    done = run("-m", "examples.byte_lm.main", "--files", str(tmp_path / "short"))
    assert "9 bytes in 1 files are too few" in done.stderr


def test_batches_are_the_same_for_the_same_seed():
    text = np.arange(200, dtype=np.uint8)
    a, b = (list(data.batches(text, 3, 10, 4, seed=1)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert a[0].shape == (3, 11)
    assert not np.array_equal(a, list(data.batches(text, 3, 10, 4, seed=2)))


def test_no_file_is_in_both_parts(tmp_path):
    files = []
    for i in range(60):
        files.append(tmp_path / f"{i:02}.txt")
        files[-1].write_bytes(bytes([i]) * 100)
    train, held_out = data.load(files, 10)
    assert len(train) == 5700
    assert len(held_out) == 300
    assert not set(train) & set(held_out)


def test_readme_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    done = run(
        str(script), PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
