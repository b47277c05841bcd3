"""The BERT program: its masks, its text, its products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.bert import data, train

WORDS = ["tensor", "worker", "momentum", "average", "layer", "gradient", "ratio"]
pytestmark = pytest.mark.usefixtures("standard_promotion")


def text_in(folder, files=25):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(files):
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(WORDS, 60)))
    return folder


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


@pytest.mark.long
def test_products_are_bfloat16():
    sizes = {"vocabulary": 120, "layers": 1, "width": 16, "heads": 2, "length": 16}
    config = train.Config(**sizes, dtype="bfloat16")
    task = train.task(config, train.blank(config))
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    batch = jax.tree.map(lambda x: x[None], task.source[0])
    jaxpr = jax.make_jaxpr(task.loss)(params, {}, batch, jax.random.key(0))
    dots = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert {e.outvars[0].aval.dtype for e in dots} == {jnp.dtype(jnp.bfloat16)}
