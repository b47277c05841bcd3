"""The sweep over options, and programs at full size, from shapes."""

import importlib

import jax
import pytest
from rich.console import Console

from examples import shapes, sweep
from examples.common import loop, processes
from tests import programs

standard = programs.standard


def test_grid():
    found = sweep.settings(["optimizer=lamb,slamb", "seed=0,1"])
    assert found[2] == (("optimizer", "slamb"), ("seed", "0"))
    assert len(found) == 4
    assert sweep.arguments((("depths", "2/2"),)) == ["--depths", "2", "2"]
    with pytest.raises(SystemExit, match="got 'seed'"):
        sweep.settings(["seed"])


def test_table_averages_over_seeds():
    def result(accuracy, sent):
        return loop.Result(10, {"accuracy": accuracy}, sent, 102400.0, 0.002)

    results = {
        (("optimizer", name), ("seed", str(seed))): result(accuracy + seed, sent)
        for name, accuracy, sent in (("lamb", 90, 102400.0), ("slamb", 95, 12288.0))
        for seed in (0, 2)
    }
    console = Console(record=True, width=120)
    console.print(sweep.table(results, "title", "caption"))
    rows = [line.split("│") for line in console.export_text().splitlines()]
    cells = {r[1].strip(): [c.strip() for c in r[2:-1]] for r in rows if len(r) > 3}
    assert cells["lamb"] == ["2", "91.000 ± 1.414", "10.0", "1.000", "2"]
    assert cells["slamb"] == ["2", "96.000 ± 1.414", "1.2", "0.120", "2"]


def test_a_sweep_makes_each_run_once(tmp_path, monkeypatch):
    made = []

    def run(task, config, mesh):
        made.append((config.optimizer, config.seed, config.out))
        return loop.Result(1, {}, 1.0, 1.0, 1.0)

    monkeypatch.setattr(loop, "run", run)
    monkeypatch.setattr(processes, "start", lambda config: None)
    chosen = sweep.settings(["optimizer=lamb,slamb", "seed=0,1"])
    for _ in range(2):
        sweep.run_all("cifar10", chosen, ["--epochs", "1"], tmp_path, Console())
    assert made[:4] == made[4:]  # the same folder for the same options
    assert len({out for _, _, out in made}) == 4
    assert [m[:2] for m in made[:4]] == [
        ("lamb", 0), ("lamb", 1), ("slamb", 0), ("slamb", 1)
    ]  # fmt: skip


@pytest.mark.long
def test_description(monkeypatch):
    def start(config):
        return processes.mesh_of(config.workers)

    monkeypatch.setattr(processes, "start", start)
    sizes = ["--layers=1", "--width=16", "--heads=2", "--length=16", "--vocabulary=50"]
    sizes += ["--min-size=0", "--sync-every=50", "--steps=100", "--workers=2"]
    found = shapes.describe("bert", sizes, compiled=False)
    assert 0.12 < found["share of dense"] < 0.25  # a tenth, a fiftieth, and biases
    dense = found["MiB sent per step"] / found["share of dense"]
    assert dense == pytest.approx(found["parameters"] * 4 / 2**20)  # two on a ring


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
MISSING = {
    "cifar10": "there is no data/cifar-10/cifar-10-binary.tar.gz. Download",
    "bert": "--files: there is no data/text",
    "swin": "there is no data/imagenet/train",
}
full_size = pytest.mark.parametrize("case", SIZES, ids=map("-".join, SIZES))


@full_size
def test_a_configuration_has_its_published_size(case, tmp_path, monkeypatch):
    program, name = case
    train = importlib.import_module(f"examples.{program}.train")
    config = programs.config_of(train, name)
    task = train.task(config, train.blank(config))
    params, kept = jax.eval_shape(task.init, jax.random.key(0))
    leaves = jax.tree.leaves(params)
    assert sum(x.size for x in leaves) == SIZES[case]
    assert {str(x.dtype) for x in leaves} == {"float32"}
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((config.batch_size, *x.shape), x.dtype),
        task.source[0],
    )
    loss, _ = jax.eval_shape(task.loss, params, kept, batch, jax.random.key(0))
    assert (loss.shape, str(loss.dtype)) == ((), "float32")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=MISSING[program]):
        train.sources(config)


@pytest.mark.long
@full_size
def test_full_size_compiles(case):
    program, name = case
    file = programs.EXAMPLES / program / "configs" / f"{name}.yaml"
    printed = programs.ended(
        "-m", "examples.shapes", program, "--config", file, "--compile", timeout=900
    )
    assert f"parameters: {SIZES[case]:,}" in printed
    assert "GiB of temporaries" in printed
