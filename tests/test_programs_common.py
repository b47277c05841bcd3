"""What the programs share: options, input, bytes, diagnostics."""

from pathlib import Path
from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import slamb_jax
from examples.common import inputs, options, processes, records
from examples.common.optimizers import KINDS, kernels, optimizer, traffic
from examples.common.options import Options
from slamb_jax import Exchange
from slamb_jax.exchange.selections import Strided
from tests.optimizers import random_tree, train_step
from tests.workers import AXIS

SHAPES = {"a": (30, 20), "b": (20,), "c": (3, 3)}
EXCHANGE = Exchange(AXIS)
PAPER = Exchange.paper(AXIS, selection=Strided(min_size=50), sync_every=3)
pytestmark = pytest.mark.usefixtures("standard_promotion")


def parse(*args):
    return options.parse(Options, "", args)


def test_files_and_command_line(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(
        "learning_rate: 0.5\nb2: 0.7\nclip_norm: 1.0\n"
        "exchange: {payload: null, sync_every: 9, selection: {min_size: 5}}\n"
    )
    found = parse("--config", str(path), "--b2", "0.9", "--clip-norm", "None")
    assert (found.learning_rate, found.b2, found.clip_norm) == (0.5, 0.9, None)
    settings = {"payload": None, "selection": Strided(min_size=5)}
    assert found.exchange == Exchange(AXIS, **settings, sync_every=9)
    path.write_text(options.as_text(found))  # what a run writes can be read again
    assert parse("--config", str(path)) == found
    words = ["--sync-every=7", "--payload", "None", "--overlap=true", "--b3=0.5"]
    words += ["--seed=3", "--selection", "{compress_ratio: 0.25}"]
    found = parse("--config", str(path), *words)
    settings = {"payload": None, "selection": Strided(0.25)}
    want = Exchange(AXIS, **settings, overlap=True, sync_every=7)
    assert (found.exchange, found.seed, found.b3) == (want, 3, 0.5)
    path = path.with_suffix(".json")
    path.write_text('{"optimizer": "sgd", "dense": true}')
    found = parse(f"--config={path}", "--b1=0.5", "--payload=uniform8")
    assert (found.optimizer, found.dense, found.b1) == ("sgd", True, 0.5)
    assert found.exchange == Exchange(AXIS, payload="uniform8")
    path.write_text(options.as_text(found))
    assert not parse(f"--config={path}", "--no-dense").dense


@pytest.mark.parametrize(
    ("args", "file", "told"),
    [
        ([], "rate: 1", "no such option: rate"),
        ([], "- 1", "a mapping"),
        ([], "a: [", "while"),
        (
            [],
            "exchange: {ratio: 1}",
            "options.yaml: exchange: 'ratio' is not a setting",
        ),
        (["--config", "none.yaml"], "seed: 1", "none.yaml"),
        (["--workers", "0"], "seed: 1", "--workers: must be at least 1, got 0"),
        (["--learning-rate", "0"], "seed: 1", "--learning-rate: must be positive"),
        (["--payload", "int8"], "seed: 1", "command line: exchange: payload .*'int8'"),
        (["--coordinator", "localhost:1"], "seed: 1", "must be given together"),
        (
            ["--coordinator", "a:1", "--process-id", "0", "--num-processes", "3"],
            "workers: 4",
            "4 cannot be divided evenly over --num-processes 3",
        ),
    ],
)
def test_wrong_options_are_told(tmp_path, args, file, told):
    (tmp_path / "options.yaml").write_text(file)
    with pytest.raises(SystemExit, match=told):
        parse("--config", str(tmp_path / "options.yaml"), *args)


def test_a_run_does_not_resume_with_other_options(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(options.as_text(Options()))
    options.check_same_run(Options(out=Path("elsewhere"), log_every=3), path)
    with pytest.raises(SystemExit, match=r"b2 was None, is 0.5"):
        options.check_same_run(Options(b2=0.5), path)
    with pytest.raises(SystemExit, match=r"exchange was .*, is .*'sync_every': 3"):
        options.check_same_run(Options(exchange=PAPER), path)
    with pytest.raises(SystemExit, match=r"workers was 4, is 3"):
        options.check_same_run(Options(workers=3), path)
    options.check_same_run(Options(workers=3, snapshots=Path("here")), path)
    assert yaml.safe_load(path.read_text())["exchange"] == {"axis_name": AXIS}


def numbered(n):
    return inputs.Arrays(x=np.arange(n))


def test_batches_do_not_depend_on_the_number_of_processes(monkeypatch):
    def batches():
        def jittered(example, rng):
            return {**example, "noise": rng.random()}

        stream = inputs.training(numbered(37), 3, 4, 1, jittered)
        return [next(stream) for _ in range(9)]

    alone, shares = batches(), []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        shares.append(batches())
    for all_of_it, *parts in zip(alone, *shares, strict=True):
        for name in ("x", "noise"):
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, all_of_it[name])
    seen = np.concatenate([batch["x"] for batch in alone])[: 37 * 2]
    assert sorted(seen) == sorted([*range(37)] * 2)  # two epochs, each example twice
    assert not np.array_equal(seen[:37], seen[37:])


def test_with_other_workers_no_example_is_seen_twice():
    four, three = (inputs.training(numbered(37), 3, n, 1) for n in (4, 3))
    whole = inputs.training(numbered(37), 3, 1, 1)
    seen = [next(whole)["x"] for _ in range(18)]
    for _ in range(2):
        next(four)  # 8 batches of a worker
    inputs.resume(three, inputs.position(four, 4), 3)
    np.testing.assert_array_equal(next(three)["x"], np.concatenate(seen[9:12]))


def test_each_held_out_example_counts_once():
    batches = list(inputs.held_out(numbered(10), 4))
    assert [len(b["x"]) for b in batches] == [4, 4, 4]
    x, weight = (np.concatenate([b[n] for b in batches]) for n in ("x", "weight"))
    assert list(x[weight == 1]) == list(range(10))


def report_of_a_step(o, mesh):
    """Of all workers, with gradients of its own."""
    tx = optimizer(o, optax.constant_schedule(0.1))

    def loss(p, batch):
        return jnp.sum((batch @ p["a"] + p["b"]) ** 2) + jnp.sum(jnp.sin(p["c"]))

    params = random_tree(SHAPES, 0)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, o.exchange)
    run = slamb_jax.per_worker_step(train_step(tx, loss), mesh, o.exchange)
    batch = jax.ShapeDtypeStruct((8, 30), jnp.float32)
    return slamb_jax.wire_report(run.lower(state, batch))


OUTER = {"sync_every": 100, "outer": optax.sgd(0.7)}


@pytest.mark.parametrize(
    ("changes", "exchange"),
    [
        *(({"optimizer": name, "dense": True}, EXCHANGE) for name in KINDS),
        *(({"optimizer": name}, EXCHANGE) for name in KINDS),
        ({"accumulate_steps": 2, "dense": True}, EXCHANGE),
        ({"accumulate_steps": 2, "clip_norm": 1.0}, Exchange(AXIS, payload="uniform8")),
        ({"optimizer": "slamb"}, PAPER),
        ({}, Exchange(AXIS, payload=None, **OUTER)),
        ({}, Exchange(AXIS, sync_every=1, payload=None, outer=optax.sgd(0.7))),
    ],
)
def test_traffic_is_that_of_the_compiled_step(changes, exchange):
    o = Options(exchange=exchange, **changes)
    mesh = processes.mesh_of(o.workers)
    found, dense = traffic(o, random_tree(SHAPES, 0), mesh)
    report = report_of_a_step(o, mesh)
    both = report.bytes_sent() + report.bytes_sent(conditional=True)
    assert both == pytest.approx(found.each + found.average)
    ring = 2 * 3 / 4 * 4  # bytes of an element
    assert dense.each == ring * (30 * 20 + 20 + 9)
    if o.dense:
        assert found == dense
    elif exchange == PAPER:
        assert found.each == ring * (60 + 20 + 9)
        assert found.average == dense.each
        assert found.until(4) == 4 * found.each + 2 * dense.each  # after steps 1 and 4
    elif exchange.outer is not None:
        assert (found.each, found.average) == (0, dense.each)
        every = exchange.sync_every
        assert found.until(every - 1) == 0
        assert found.until(2 * every - 1) == (2 * every - 1) // every * dense.each
    else:
        assert found.until(10) == 10 * found.each
        assert found.average == 0


def test_only_kernels_decay():
    names = {"kernel": True, "bias": False, "scale": False, "embedding": True}
    names["relative_position_bias"] = False
    params = {"layer_0": dict.fromkeys(names, 1.0)}
    assert kernels(params) == {"layer_0": names}


def test_every_optimizer_has_a_name():
    assert set(KINDS) == set(get_args(get_type_hints(Options)["optimizer"]))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_options_reach_the_optimizer(name, dense):
    """A single worker's steps, with and without them, and with a mask."""
    params = {"a": random_tree({"kernel": (4, 4), "bias": (4,)}, 0)}

    def steps(mask=None, **given):
        o = Options(optimizer=name, dense=dense, exchange=EXCHANGE, **given)
        tx = optimizer(o, optax.constant_schedule(0.1), mask)

        def run(params):
            state = tx.init(params)
            for t in range(3):
                grads = {"a": random_tree({"kernel": (4, 4), "bias": (4,)}, t)}
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
            return params

        one = jax.tree.map(lambda x: x[None], params)
        return jax.tree.map(np.asarray, jax.vmap(run, axis_name=AXIS)(one)["a"])

    without = steps(weight_decay=0.0)
    decayed = steps(kernels, weight_decay=0.1)
    assert np.abs(decayed["kernel"] - without["kernel"]).max() > 1e-4
    np.testing.assert_array_equal(decayed["bias"], without["bias"])
    moved = steps(weight_decay=0.0, b1=0.3)
    assert np.abs(moved["kernel"] - without["kernel"]).max() > 1e-4


def test_progress_shows_where_the_output_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr(records, "LINE_SECONDS", 0.0)
    with records.progress_bar("a run", 0, 20) as show:
        show(10, "loss 2")
        assert capsys.readouterr().out == "a run  10/20  loss 2\n"
        monkeypatch.setattr(records, "LINE_SECONDS", 60.0)
        show(15, "loss 1.5")
        show(20, "loss 1")
    assert capsys.readouterr().out == "a run  20/20  loss 1\n"
    with records.progress_bar("quiet", 0, 20, hidden=True) as show:
        show(20, "")
    assert not capsys.readouterr().out
