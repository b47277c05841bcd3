"""The BERT program: its tokens and masks, its sizes, one step, a stopped run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from examples.bert import data, train
from examples.common import options
from tests import programs

WORDS = ["tensor", "worker", "momentum", "average", "layer", "gradient", "ratio"]
TINY = {"vocabulary": 120, "layers": 1, "width": 16, "heads": 2, "length": 16}
TINY |= {"batch_size": 2, "workers": 2, "steps": 4, "accumulate_steps": 2}
TINY |= {"warmup_steps": 2, "log_every": 1, "dropout": 0.1}
TINY["exchange"] = dataclasses.replace(train.EXCHANGE, sync_every=3, min_size=100)
standard = programs.standard


def text_in(folder, files=25):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(files):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS, 60)))
    return folder


def tiny(tmp_path, out, **changes):
    where = {"files": (tmp_path / "text",), "cache": tmp_path / "tokens"}
    return train.Config(**{**TINY, **where, "out": tmp_path / out, **changes})


def run(config):
    return programs.train(train.task(config, train.sources(config)), config)


def test_masking():
    inside = 126
    sequence = np.concatenate([[data.CLS], np.arange(50, 50 + inside), [data.SEP]])
    rng = np.random.default_rng(0)
    hidden = kept = 0
    for _ in range(400):
        found = data.masking(1000)({"tokens": sequence.astype(np.int32)}, rng)
        at = found["positions"]
        assert len(set(at)) == len(at) == 19  # 15 % of 126
        assert at.min() >= 1
        assert at.max() <= inside
        np.testing.assert_array_equal(found["labels"], sequence[at])
        elsewhere = np.delete(np.arange(inside + 2), at)
        np.testing.assert_array_equal(found["tokens"][elsewhere], sequence[elsewhere])
        hidden += np.sum(found["tokens"][at] == data.MASK)
        kept += np.sum(found["tokens"][at] == sequence[at])
    assert hidden / (400 * 19) == pytest.approx(0.8, abs=0.02)
    assert kept / (400 * 19) == pytest.approx(0.1, abs=0.02)


def test_text_becomes_sequences(tmp_path):
    files = [text_in(tmp_path / "text")]
    train_on, held_out = data.load(files, tmp_path / "tokens", 120, 16)
    words = sum(len(x.tokens) for x in (train_on, held_out.sequences))
    assert words == 25 * 61  # each word one token, and a separator behind each file
    first = train_on[0]["tokens"]
    assert (first[0], first[-1], len(first)) == (data.CLS, data.SEP, 16)
    row = np.concatenate([train_on[i]["tokens"][1:-1] for i in range(len(train_on))])
    np.testing.assert_array_equal(row, train_on.tokens[: len(row)])
    for name, x in held_out[3].items():
        np.testing.assert_array_equal(x, held_out[3][name])  # masked once and for all
    before = (tmp_path / "tokens").stat().st_mtime_ns
    data.load(files, tmp_path / "tokens", 120, 16)
    assert (tmp_path / "tokens").stat().st_mtime_ns == before


def test_too_little_text(tmp_path):
    (tmp_path / "a").write_text("one")
    with pytest.raises(SystemExit, match="at least two files are needed, got 1"):
        data.load([tmp_path / "a"], tmp_path / "tokens", 120, 16)
    (tmp_path / "b").write_text("two")
    with pytest.raises(SystemExit, match="are too few for sequences of 16"):
        data.load([tmp_path / "a", tmp_path / "b"], tmp_path / "tokens", 120, 16)
    assert len(list((tmp_path / "tokens").iterdir())) == 1  # nothing half made


@pytest.mark.parametrize(
    ("name", "least"), [("length", 3), ("vocabulary", 6), ("steps", 1)]
)
def test_sizes_out_of_range(name, least):
    with pytest.raises(SystemExit, match=f"--{name}: must be at least {least}, got 0"):
        options.parse(train.Config, "", [f"--{name}", "0"])
    options.parse(train.Config, "", [f"--{name}", str(least)])


@pytest.mark.long
def test_one_step(tmp_path):
    config = tiny(tmp_path, "run", accumulate_steps=1, warmup_steps=0)
    blank = train.blank(config)
    before, after, metrics = programs.one_step(train.task(config, blank), config)
    assert np.isfinite(metrics["loss"]).all()
    embeddings = after.params["Embed_0"]["embedding"]
    assert not np.allclose(embeddings[0], before.params["Embed_0"]["embedding"])


@pytest.mark.long
def test_a_stopped_run_resumes_to_the_last_bit(tmp_path, monkeypatch):
    text_in(tmp_path / "text")
    with programs.compiled_once(tmp_path / "compiled"):
        result = run(tiny(tmp_path, "one"))
        with monkeypatch.context() as patched:
            programs.stopping_at(2, patched)
            with pytest.raises(SystemExit):
                run(tiny(tmp_path, "parts"))
        parts = run(tiny(tmp_path, "parts"))
    assert parts.metrics == result.metrics
    programs.assert_same_run(tmp_path / "one", tmp_path / "parts")
    assert programs.checkpoint(tmp_path / "parts")[1] == {"next_index": 8}
    rates = programs.series(tmp_path / "one", "learning_rate")
    np.testing.assert_allclose(rates, [0, 0.005, 0.01, 0.01 * 0.5**0.5], rtol=1e-5)


def test_the_papers_settings():
    config = programs.config_of(train, "large")
    batch = config.batch_size * config.accumulate_steps * config.workers
    assert (batch, config.length, config.steps) == (65_536, 128, 7038)
    assert (config.b3, config.learning_rate) == (0.93, 6e-3)
    assert config.exchange == slamb_jax.Exchange(
        "data", compress_ratio=0.1, min_size=9000, sync_every=100
    )
    task = train.task(config, train.blank(config))
    rates = [float(task.schedule(t)) for t in (0, 1000, 2000, 4519, 7038)]
    want = np.array([0, 0.5, 1, 0.5**0.5, 0]) * 6e-3
    np.testing.assert_allclose(rates, want, rtol=1e-4, atol=1e-9)


@pytest.mark.long
def test_products_are_bfloat16_and_kernels_decay(tmp_path):
    config = tiny(tmp_path, "run", dtype="bfloat16")
    task = train.task(config, train.blank(config))
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: x[None], task.source[0])
    jaxpr = jax.make_jaxpr(task.loss)(params, {}, batch, jax.random.key(0))
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert {e.outvars[0].aval.dtype for e in dots} == {jnp.dtype(jnp.bfloat16)}
    layer = task.decay_mask(params)["layer_0"]
    attention = layer["MultiHeadDotProductAttention_0"]
    assert attention["query"] == {"kernel": True, "bias": False}
    assert layer["Dense_0"] == {"kernel": True, "bias": False}
    assert layer["LayerNorm_0"] == {"scale": False, "bias": False}
