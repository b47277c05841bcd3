"""What the programs share: options, sizes, input, optimizers, bytes."""

import functools
import importlib
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import slamb_jax
from examples.bert import data as text
from examples.common import inputs, options, processes
from examples.common.optimizers import KINDS, kernels, optimizer
from examples.common.options import Options
from examples.common.traffic import traffic_of
from slamb_jax import Exchange
from slamb_jax.exchange.selections import Strided
from tests import programs
from tests.optimizers import any_lamb, descend, random_tree, train_step
from tests.workers import AXIS, on_mesh

EXCHANGE = Exchange(AXIS)
NUMBERS = inputs.examples_of(x=np.arange(37))
PAPER = Exchange.paper(AXIS, selection=Strided(min_size=50), sync_every=3)
EVERY_STEP = Exchange(AXIS, payload=None, sync_every=1, outer=optax.sgd(0.7))
pytestmark = pytest.mark.usefixtures("standard_promotion")


def parse(*args):
    return options.parse(Options, "", args)


def test_files_and_command_line(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(
        "learning_rate: 0.5\nb2: 0.7\nclip_norm: 1.0\ndense: true\n"
        "exchange: {payload: uniform8, sync_every: 9, selection: {min_size: 5}}\n"
    )
    selection = Strided(min_size=5)
    exchange = Exchange(AXIS, payload="uniform8", sync_every=9, selection=selection)
    of_file = {"learning_rate": 0.5, "b2": 0.7, "clip_norm": 1.0, "dense": True}
    found = parse("--config", str(path))
    assert found == Options(**of_file, exchange=exchange)
    path.write_text(options.as_text(found))  # what a run writes can be read again
    assert parse("--config", str(path)) == found
    words = ["--b2=0.9", "--clip-norm=None", "--no-dense", "--sync-every=7"]
    words += ["--payload=None", "--selection={compress_ratio: 0.25}"]
    exchange = Exchange(AXIS, payload=None, sync_every=7, selection=Strided(0.25))
    want = Options(learning_rate=0.5, b2=0.9, exchange=exchange)
    assert parse(f"--config={path}", *words) == want


PROCESSES = "--coordinator a:1 --process-id 0 --num-processes 3"


@pytest.mark.parametrize(
    ("args", "file", "told"),
    [
        ("", "rate: 1", "no such option: rate"),
        ("", "- 1", "a mapping"),
        ("", "exchange: {ratio: 1}", "yaml: exchange: .* argument 'ratio'"),
        ("--config none.yaml", "seed: 1", "none.yaml"),
        ("--workers 0", "seed: 1", "--workers: must be at least 1, got 0"),
        ("--learning-rate 0", "seed: 1", "--learning-rate: must be positive"),
        ("--payload int8", "seed: 1", "command line: exchange: payload .*'int8'"),
        ("--coordinator localhost:1", "seed: 1", "must be given together"),
        (PROCESSES, "workers: 4", "4 cannot be divided evenly over --num-processes 3"),
    ],
)
def test_wrong_options_are_told(tmp_path, args, file, told):
    (tmp_path / "options.yaml").write_text(file)
    with pytest.raises(SystemExit, match=told):
        parse("--config", str(tmp_path / "options.yaml"), *args.split())


def test_a_run_does_not_resume_with_other_options(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(options.as_text(Options()))
    free = {"out": Path("elsewhere"), "log_every": 3, "workers": 3}
    options.check_same_run(Options(**free), path)
    told = "exchange was .*, is .*'sync_every': 3.*, b2 was None, is 0.5"
    with pytest.raises(SystemExit, match=told):
        options.check_same_run(Options(b2=0.5, exchange=PAPER), path)
    assert yaml.safe_load(path.read_text())["exchange"] == {"axis_name": AXIS}


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
SCORED = {("cifar10", "slamb"), ("bert", "base"), ("swin", "tiny")}
RATES = {  # steps, and the learning rate at some of them, as published
    ("cifar10", "slamb"): (9766, {0: 0.01, 4882: 0.01, 4884: 1e-3, 9765: 1e-4}),
    ("bert", "large"): (7038, {0: 0, 1000: 3e-3, 2000: 6e-3, 4519: 4.2426e-3, 7038: 0}),
    ("swin", "base"): (23_459, {782: 2.828e-3, 1564: 5.656e-3}),
}


def sources_of(program, config):
    """Examples of the program's shapes, and as many; they take no memory."""
    if program == "bert":
        tokens = np.broadcast_to(np.uint16(0), 1000 * config.length)
        row = text.sequences(tokens, config.length)
        return [text.masked(row, config.vocabulary)] * 2
    number, side = (1_281_167, 224) if program == "swin" else (50_000, 32)
    image = np.broadcast_to(np.float32(0), (number, side, side, 3))
    return [inputs.examples_of(image=image, label=np.zeros(number, np.int32))] * 2


@pytest.mark.parametrize(("program", "name"), SIZES)
def test_a_configuration_has_its_published_size(program, name):
    """And its scores, tried in one size, are numbers in float32."""
    main = importlib.import_module(f"examples.{program}.main")
    path = programs.EXAMPLES / program / "configs" / f"{name}.yaml"
    config = options.parse(main.Config, "", ["--config", str(path)])
    task = main.task(config, sources_of(program, config))
    params, statistics = jax.eval_shape(task.init, jax.random.key(0))
    leaves = jax.tree.leaves(params)
    assert sum(x.size for x in leaves) == SIZES[program, name]
    chex.assert_type(leaves, jnp.float32)
    first = jax.tree.map(lambda x: np.stack([x] * config.batch_size), task.source[0])
    for key in (jax.random.key(0), None) if (program, name) in SCORED else ():
        scores, _ = jax.eval_shape(task.scores, params, statistics, first, key)
        for score in scores.values():
            assert (score.shape, score.dtype) == ((config.batch_size,), jnp.float32)
    steps, rates = RATES.get((program, name), (task.steps, {}))
    assert task.steps == steps
    found = [float(task.schedule(t)) for t in rates]
    assert found == pytest.approx([*rates.values()], rel=1e-3, abs=1e-9)


def test_batches_do_not_depend_on_the_number_of_processes(monkeypatch):
    def jittered(example, rng):
        return {**example, "noise": rng.random()}

    def batches(index, processes):
        monkeypatch.setattr(jax, "process_count", lambda: processes)
        monkeypatch.setattr(jax, "process_index", lambda: index)
        stream = inputs.training(NUMBERS, 3, 4, 1, jittered)
        return [next(stream) for _ in range(9)]

    alone, shares = batches(0, 1), [batches(i, 2) for i in range(2)]
    joined = jax.tree.map(lambda *x: np.concatenate(x), *shares)
    chex.assert_trees_all_equal(joined, alone)
    seen = np.concatenate([batch["x"] for batch in alone])[: 37 * 2]
    assert sorted(seen) == sorted([*range(37)] * 2)  # two epochs, each example twice
    assert not np.array_equal(seen[:37], seen[37:])


def test_with_other_workers_no_example_is_seen_twice_and_each_held_out_once():
    four, three, whole = (inputs.training(NUMBERS, 3, n, 1) for n in (4, 3, 1))
    seen = [next(whole)["x"] for _ in range(18)]
    for _ in range(2):
        next(four)  # 8 batches of a worker
    inputs.resume(three, inputs.position(four, 4), 3)
    np.testing.assert_array_equal(next(three)["x"], np.concatenate(seen[9:12]))
    batches = list(inputs.held_out(inputs.examples_of(x=np.arange(10)), 4))
    chex.assert_tree_shape_prefix(batches, (4,))
    x, weight = (np.concatenate([b[n] for b in batches]) for n in ("x", "weight"))
    assert list(x[weight == 1]) == list(range(10))


@pytest.mark.parametrize("exchange", [EXCHANGE, PAPER, EVERY_STEP])
def test_traffic_is_that_of_the_compiled_step(exchange):
    """Of all steps, of every method: ``test_the_bytes_of_all_steps_are_counted``."""
    params, mesh = random_tree({"w": (30, 20), "b": (20,)}, 0), processes.mesh_of(4)
    found = traffic_of(functools.partial(any_lamb, 0.1), exchange, params, mesh)
    tx = any_lamb(0.1, exchange)
    step = train_step(tx, lambda p, x: jnp.sum((x @ p["w"] + p["b"]) ** 2))
    run, state = on_mesh(step, (params, tx.init(params)), mesh, exchange)
    batch = jax.ShapeDtypeStruct((8, 30), jnp.float32)
    report = slamb_jax.wire_report(run.lower(state, batch))
    both = report.bytes_sent() + report.bytes_sent(conditional=True)
    assert both == pytest.approx(found.each + found.average)
    whole = 2 * 3 / 4 * 4 * (30 * 20 + 20)
    assert found.average == (0 if exchange.averages_momentum else whole)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_options_reach_the_optimizer(name, dense):
    """A single worker's steps, with and without them, and with a mask."""
    shapes = {"kernel": (4, 4), "bias": (4,)}
    start, grads = random_tree(shapes, 0), random_tree(shapes, 1, 1, 6)
    # SLAMB needs a selection, and Muon more bits.
    exchanges = {"slamb": PAPER, "muon": Exchange(AXIS, payload="uniform8")}

    def at_step(params, grads, t):
        return jax.tree.map(lambda x: x[t], grads)

    def steps(mask=None, **given):
        o = Options(
            optimizer=name, dense=dense, exchange=exchanges.get(name, EXCHANGE), **given
        )
        tx = optimizer(o, optax.constant_schedule(0.1), mask)
        return descend(tx, at_step, start, grads, steps=6)

    without, moved = (steps(weight_decay=0.0, **b1) for b1 in ({}, {"b1": 0.3}))
    decayed = steps(kernels, weight_decay=0.1)
    np.testing.assert_array_equal(decayed["bias"], without["bias"])
    for other in (decayed, moved):
        assert jnp.abs(other["kernel"] - without["kernel"]).max() > 1e-4
