"""Simulated runs, the main job, and the README's code."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from examples.byte_lm import data, methods
from examples.common import simulated
from examples.common.optimizers import dense
from examples.common.optimizers import slamb_from_links as from_links
from slamb_jax import recipes
from tests import programs

TINY = {"steps": 2, "evaluations": 2, "batch": 1, "context": 16, "layers": 2}
TINY |= {"width": 16, "heads": 2, "eval-batch": 8, "min-size": 100}
standard = programs.standard


def line():
    """A linear model, 40 x 3, of data from one of the same kind."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(40, 3)).astype(np.float32)

    def examples(size, seed):
        x = np.random.default_rng(seed).normal(size=(size, 40)).astype(np.float32)
        return {"x": x, "y": x @ truth}

    def loss(params, batch):
        return jnp.mean(jnp.square(batch["x"] @ params["w"] - batch["y"]))

    return simulated.Task(
        init=lambda key: {"w": 0.1 * jax.random.normal(key, (40, 3))},
        loss=loss,
        batches=lambda size, steps, seed: (
            examples(size, [seed, t]) for t in range(steps)
        ),
        held_out=examples(50, 1),
    )


def slamb(make=slamb_jax.slamb):
    exchange = slamb_jax.Exchange(simulated.AXIS, compress_ratio=0.25, sync_every=4)
    return simulated.Method(
        "SLAMB", functools.partial(make, nu_of="momentum"), exchange
    )


def averaged():
    return simulated.Method("SGD", lambda rate, _: dense(optax.sgd(rate), "data"))


def run(method, rate=0.1, *, workers=4, batch=4, sent=None, **how):
    program = simulated.Program(
        line(), method, workers=workers, batch=batch, steps=8, **how
    )
    return simulated.train(program, rate, due=[3, 8], sent=sent)


def test_dense_runs_are_those_of_one_worker_with_all_of_the_batch():
    many, one = run(averaged()), run(averaged(), workers=1, batch=16)
    np.testing.assert_allclose(many.losses, one.losses, rtol=1e-5)
    assert many.steps == [3, 8]
    assert many.losses[1] < many.losses[0]
    assert 0 < many.seconds[0] < many.seconds[1]


def test_simulated_workers_are_those_on_devices_and_the_links_are_slamb():
    mesh = jax.make_mesh((4,), (simulated.AXIS,), devices=jax.devices()[:4])
    here, there, links = run(slamb()), run(slamb(), mesh=mesh), run(slamb(from_links))
    np.testing.assert_allclose(here.losses, there.losses, rtol=1e-5)
    np.testing.assert_allclose(here.losses, links.losses, rtol=1e-5)


def test_evaluations_are_evenly_spaced_and_none_is_made_twice():
    assert simulated.evaluation_steps(400, 4) == [100, 200, 300, 400]
    assert simulated.evaluation_steps(300, 8, 25)[:3] == [50, 75, 100]
    assert simulated.evaluation_steps(2, 10) == [1, 2]


def test_a_run_that_diverges_has_nan_from_there_on():
    found = run(averaged(), 1e38, sent=lambda t: 5.0 * t)
    assert all(map(math.isnan, found.losses))
    assert found.sent == [15.0, 40.0]
    assert len(found.steps) == len(found.losses) == len(found.seconds) == 2


def test_every_method_of_the_main_job_has_a_rate_and_the_settings_given():
    for name in methods.RATES:
        chosen = methods.method(name, 10, 0, {"sync_every": 3})
        assert chosen.exchange.axis_name == simulated.AXIS
        if name.startswith("slamb"):
            assert chosen.exchange.sync_every == 3
    few = methods.method("slamb_few_bytes", 10, 0, {})
    assert few.exchange == recipes.FEW_BYTES.exchange(simulated.AXIS)
    with pytest.raises(ValueError, match=r"slamb_paper.*got 'adam'"):
        methods.method("adam", 10, 0, {})


@pytest.mark.long
def test_main_job(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 90)
    options = [f"--{name}={value}" for name, value in TINY.items()]
    printed = programs.ended(
        "-m", "examples.byte_lm.main", *options, "--files", tmp_path / "text",
        "--out", tmp_path / "out", "--optimizer", *methods.RATES,
    )  # fmt: skip
    runs = json.loads((tmp_path / "out" / "results.json").read_text())
    by_name = dict(zip(methods.RATES, runs, strict=True))
    for r in runs:
        assert r["steps"] == [1, 2]
        assert np.isfinite(r["losses"]).all()
        assert r["name"].split(",")[0] in printed
    sent = {name: r["sent"][-1] for name, r in by_name.items()}
    assert sent["lamb"] == sent["lars"]
    assert sent["slamb_float32"] == sent["slamb_from_links"]
    assert sent["slamb_few_bytes"] < 0.5 * sent["slamb_float32"]
    assert sent["jointspar_lars"] <= 1.01 * sent["lamb"]
    assert "2.00 of 2 blocks active on average" in printed
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


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


@pytest.mark.long
def test_readme_code_runs(tmp_path):
    text = (programs.ROOT / "README.md").read_text()
    script = tmp_path / "readme.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.S)))
    programs.ended(
        script, PYTHONPATH=str(programs.ROOT),
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )  # fmt: skip
