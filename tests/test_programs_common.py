"""What the programs share: options, input, bytes, diagnostics."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import slamb_jax
from examples.common import diagnostics, inputs, options, processes
from examples.common.optimizers import optimizer, traffic
from examples.common.options import Options
from examples.common.traffic import Traffic
from tests import programs
from tests.workers import AXIS, random_tree

SHAPES = {"a": (30, 20), "b": (20,), "c": (3, 3)}
standard = programs.standard


def parse(*args):
    return options.parse(Options, "", args)


def exchange(**settings):
    return slamb_jax.Exchange(AXIS, **settings)


def test_files_and_command_line(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(
        "learning_rate: 0.5\nb3: 0.7\nclip_norm: 1.0\n"
        "exchange: {compress_ratio: {0: 0.5, 9: 0.1}, payload: uniform4}\n"
    )
    found = parse("--config", str(path), "--b3", "0.9", "--clip-norm", "None")
    assert (found.learning_rate, found.b3, found.clip_norm) == (0.5, 0.9, None)
    ratios = {0: 0.5, 9: 0.1}
    assert found.exchange == exchange(compress_ratio=ratios, payload="uniform4")
    path.write_text(options.as_text(found))  # what a run writes can be read again
    assert parse("--config", str(path)) == found
    words = ["--sync-every=7", "--payload", "None", "--overlap=true", "--seed=3"]
    found = parse("--config", str(path), *words, "--compress-ratio", "{0: 0.25}")
    want = exchange(compress_ratio={0: 0.25}, overlap=True, sync_every=7)
    assert (found.exchange, found.seed) == (want, 3)
    path = path.with_suffix(".json")
    path.write_text('{"optimizer": "lamb", "distributed": true}')
    found = parse(f"--config={path}")
    assert (found.optimizer, found.distributed) == ("lamb", True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rate: 1", "no such option: rate"),
        ("- 1", "a mapping"),
        ("a: [", "while"),
        ("exchange: {ratio: 1}", "options.yaml: exchange: 'ratio' is not a setting"),
        ("exchange: 3", "options.yaml: exchange: .* a mapping, got 3"),
    ],
)
def test_files_say_what_is_wrong(tmp_path, text, told):
    (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(SystemExit, match=told):
        parse("--config", str(tmp_path / "options.yaml"))


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--workers", "0"], "--workers: must be at least 1, got 0"),
        (["--learning-rate", "0"], "--learning-rate: must be positive, got 0"),
        (["--payload", "int8"], "command line: exchange: payload .*'int8'"),
        (["--coordinator", "localhost:1"], "must be given together"),
        (["--config", "none.yaml"], "none.yaml"),
        (
            ["--coordinator", "a:1", "--process-id", "0", "--num-processes", "3"],
            "4 cannot be divided evenly over --num-processes 3",
        ),
    ],
)
def test_options_out_of_range(args, told):
    with pytest.raises(SystemExit, match=told):
        parse(*args)


def test_a_run_does_not_resume_with_other_options(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(options.as_text(Options()))
    options.check_same_run(Options(out=Path("elsewhere"), log_every=3), path)
    with pytest.raises(SystemExit, match=r"b3 was 0.99, is 0.5"):
        options.check_same_run(Options(b3=0.5), path)
    with pytest.raises(SystemExit, match=r"exchange was .*50.*, is .*'sync_every': 9"):
        options.check_same_run(Options(exchange=exchange(sync_every=9)), path)
    assert yaml.safe_load(path.read_text())["exchange"]["sync_every"] == 50


def numbered(n):
    return inputs.Arrays(x=np.arange(n))


def jittered(example, rng):
    return {**example, "noise": rng.random()}


def taken(stream, n):
    return [next(stream) for _ in range(n)]


def test_batches_do_not_depend_on_the_number_of_processes(monkeypatch):
    alone = taken(inputs.training(numbered(37), 3, 4, 1, jittered), 9)
    shares = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for index in range(2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        shares.append(taken(inputs.training(numbered(37), 3, 4, 1, jittered), 9))
    for all_of_it, *parts in zip(alone, *shares, strict=True):
        for name in ("x", "noise"):
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(joined, all_of_it[name])
    seen = np.concatenate([batch["x"] for batch in alone])[: 37 * 2]
    assert sorted(seen) == sorted([*range(37)] * 2)  # two epochs, each example twice
    assert not np.array_equal(seen[:37], seen[37:])


def test_a_stream_resumes_where_it_stood():
    stream = inputs.training(numbered(10), 2, 2, 0, jittered)
    taken(stream, 3)
    position = inputs.position(stream)
    later = taken(stream, 4)
    again = inputs.training(numbered(10), 2, 2, 0, jittered)
    again.set_state(position)
    for a, b in zip(later, taken(again, 4), strict=True):
        np.testing.assert_array_equal(a["x"], b["x"])
        np.testing.assert_array_equal(a["noise"], b["noise"])


def test_each_held_out_example_counts_once():
    batches = list(inputs.held_out(numbered(10), 4))
    assert [len(b["x"]) for b in batches] == [4, 4, 4]
    x, weight = (np.concatenate([b[n] for b in batches]) for n in ("x", "weight"))
    assert list(x[weight == 1]) == list(range(10))


def report_of_a_step(o, mesh):
    """Of all workers, with gradients of its own."""
    tx = optimizer(o, optax.constant_schedule(0.1))

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.sum((batch @ p["a"] + p["b"]) ** 2))(params)
        grads["c"] = jnp.sin(params["c"])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    params = random_tree(SHAPES, 0)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, o.exchange)
    run = slamb_jax.per_worker_step(step, mesh, o.exchange)
    batch = jax.ShapeDtypeStruct((8, 30), jnp.float32)
    return slamb_jax.wire_report(run.lower(state, batch))


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ({}, {}),
        ({"optimizer": "lamb", "accumulate_steps": 2}, {}),
        ({"accumulate_steps": 2, "clip_norm": 1.0}, {"payload": "uniform8"}),
        ({}, {"payload": "uniform8", "average_payload": "bfloat16"}),
    ],
)
def test_traffic_is_that_of_the_compiled_step(changes, settings):
    o = Options(exchange=exchange(min_size=50, **settings), **changes)
    mesh = processes.mesh_of(o.workers)
    found, dense = traffic(o, random_tree(SHAPES, 0), mesh)
    report = report_of_a_step(o, mesh)
    both = report.bytes_sent() + report.bytes_sent(conditional=True)
    assert both == pytest.approx(found.exchange[0] + found.average)
    elements = 30 * 20 + 20 + 9
    assert dense.exchange == {0: 2 * 3 / 4 * 4 * elements}
    if o.optimizer == "lamb":
        assert found == dense
    elif not settings:
        assert found.exchange[0] == 2 * 3 / 4 * 4 * (60 + 20 + 9)
        assert found.average == dense.exchange[0]


def test_bytes_until_a_step():
    sent = Traffic({0: 50.0, 10: 20.0, 15: 10.0}, 100.0, 7)
    by_step = [
        (50 if t < 10 else 20 if t < 15 else 10) + (100 if t % 7 == 0 else 0)
        for t in range(30)
    ]
    assert [sent.until(t) for t in range(31)] == [sum(by_step[:t]) for t in range(31)]
    assert Traffic({0: 2.0}).until(7) == 14.0


def test_spread_and_trust_ratios():
    o = Options(exchange=exchange(min_size=50, sync_every=1000))
    mesh = processes.mesh_of(4)
    params = random_tree(SHAPES, 0, 4)
    tx = optimizer(o, optax.constant_schedule(0.1))
    state = slamb_jax.replicate(tx.init(random_tree(SHAPES, 0)), mesh, o.exchange)
    (own,) = [s for s in diagnostics._states(state) if hasattr(s, "nu")]
    mu = random_tree(SHAPES, 1, 4)
    nu = jax.tree.map(jnp.square, random_tree(SHAPES, 2, 4))
    own = own._replace(count=jnp.full((4,), 3, jnp.int32), mu=mu, nu=nu)
    found = diagnostics.diagnose(o, mesh)(params, own)
    p = np.concatenate([np.asarray(x).reshape(4, -1) for x in params.values()], 1)
    mean = p.mean(0)
    apart = np.sqrt(((p - mean) ** 2).sum(1).mean()) / np.sqrt((mean**2).sum())
    assert found["replica_spread"] == pytest.approx(apart, rel=1e-5)
    m, v = np.asarray(mu["a"]), np.asarray(nu["a"])
    u = (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.999**3)) + o.eps)
    ratio = [np.linalg.norm(params["a"][i]) / np.linalg.norm(u[i]) for i in range(4)]
    assert found["trust_ratio"]["a"] == pytest.approx(np.mean(ratio), rel=1e-4)
    assert set(found["trust_ratio"]) == set(SHAPES)
    sgdm = optimizer(dataclasses.replace(o, optimizer="sgdm"), lambda t: 0.1)
    assert diagnostics.diagnose(o, mesh)(params, sgdm.init(params))["trust_ratio"] == {}
