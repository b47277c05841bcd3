"""The sweep over options, and programs at full size, from shapes."""

import importlib

import jax
import pytest
from rich.console import Console

from examples import sweep
from examples.common import loop, options, processes
from tests import programs

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_grid():
    assert sweep.arguments((("depths", "2/2"),)) == ["--depths", "2", "2"]
    found = sweep.arguments(
        (("dense", "false"), ("remat", "true"), ("overlap", "true"))
    )
    assert found == ["--no-dense", "--remat", "--overlap", "true"]
    with pytest.raises(SystemExit, match="got 'seed'"):
        sweep.settings(["seed"])


def test_a_sweep_makes_each_run_once(tmp_path, monkeypatch):
    made = []

    def run(task, config, mesh):
        made.append((config.optimizer, config.seed, config.out))
        return loop.Result(1, {}, 1.0, 1.0, 1.0)

    monkeypatch.setattr(loop, "run", run)
    monkeypatch.setattr(processes, "start", lambda config: None)
    chosen = sweep.settings(["optimizer=adamw,slamb", "seed=0,1"])
    for _ in range(2):
        sweep.run_all("cifar10", chosen, ["--epochs", "1"], tmp_path, Console())
    assert made[:4] == made[4:]  # the same folder for the same options
    assert len({out for _, _, out in made}) == 4
    assert [m[:2] for m in made[:4]] == [
        ("adamw", 0), ("adamw", 1), ("slamb", 0), ("slamb", 1)
    ]  # fmt: skip


SIZES = {
    ("cifar10", "sgdm"): 1_727_962,
    ("cifar10", "lamb"): 1_727_962,
    ("cifar10", "slamb"): 1_727_962,
    ("bert", "base"): 109_217_850,
    ("bert", "large"): 334_779_194,
    ("bert", "xl"): 2_822_507_322,
    ("swin", "tiny"): 28_288_354,  # as the authors of Swin count
    ("swin", "base"): 87_768_224,
}
RATES = {  # steps, and the learning rate at some of them, as published
    ("cifar10", "slamb"): (9766, {0: 0.01, 4882: 0.01, 4884: 1e-3, 9765: 1e-4}),
    ("bert", "large"): (7038, {0: 0, 1000: 3e-3, 2000: 6e-3, 4519: 4.2426e-3, 7038: 0}),
    ("swin", "base"): (23_459, {782: 2.828e-3, 1564: 5.656e-3}),
}
full_size = pytest.mark.parametrize(("program", "name"), SIZES)


def config_file(program, name):
    return programs.EXAMPLES / program / "configs" / f"{name}.yaml"


@full_size
def test_a_configuration_has_its_published_size(program, name):
    train = importlib.import_module(f"examples.{program}.train")
    args = "--config", str(config_file(program, name))
    config = options.parse(train.Config, "", args)
    task = train.task(config, train.blank(config))
    params, kept = jax.eval_shape(task.init, jax.random.key(0))
    leaves = jax.tree.leaves(params)
    assert sum(x.size for x in leaves) == SIZES[program, name]
    assert {str(x.dtype) for x in leaves} == {"float32"}
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((config.batch_size, *x.shape), x.dtype),
        task.source[0],
    )
    loss, _ = jax.eval_shape(task.loss, params, kept, batch, jax.random.key(0))
    assert (loss.shape, str(loss.dtype)) == ((), "float32")
    steps, rates = RATES.get((program, name), (task.steps, {}))
    assert task.steps == steps
    found = [float(task.schedule(t)) for t in rates]
    assert found == pytest.approx([*rates.values()], rel=1e-3, abs=1e-9)


@pytest.mark.long
@full_size
def test_full_size_compiles(program, name):
    words = program, "--config", config_file(program, name), "--compile"
    printed = programs.ended("-m", "examples.shapes", *words, timeout=900)
    assert f"parameters: {SIZES[program, name]:,}" in printed
    assert "GiB of temporaries" in printed
