"""The BERT program: its masks, its text, its products."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.bert import data, train
from tests.programs import text_in

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_masking():
    sequence = np.array([data.CLS, *range(50, 50 + 126), data.SEP], np.int32)
    rng = np.random.default_rng(0)
    hidden = kept = 0
    for _ in range(400):
        found = data.masking(1000)({"tokens": sequence}, rng)
        at = found["positions"]
        assert len(set(at)) == len(at) == 19  # 15 % of 126
        assert 1 <= at.min() < at.max() <= 126
        np.testing.assert_array_equal(found["labels"], sequence[at])
        elsewhere = np.delete(np.arange(126 + 2), at)
        np.testing.assert_array_equal(found["tokens"][elsewhere], sequence[elsewhere])
        hidden += np.mean(found["tokens"][at] == data.MASK) / 400
        kept += np.mean(found["tokens"][at] == sequence[at]) / 400
    assert (hidden, kept) == pytest.approx((0.8, 0.1), abs=0.02)


def test_text_becomes_sequences_once(tmp_path):
    given = [text_in(tmp_path / "text")], tmp_path / "tokens", 120, 16
    train_on, held_out = data.load(*given)
    words = sum(len(x.tokens) for x in (train_on, held_out.sequences))
    assert words == 25 * 61  # each word one token, and a separator behind each file
    first = train_on[0]["tokens"]
    assert (first[0], first[-1], len(first)) == (data.CLS, data.SEP, 16)
    row = np.concatenate([train_on[i]["tokens"][1:-1] for i in range(len(train_on))])
    np.testing.assert_array_equal(row, train_on.tokens[: len(row)])
    chex.assert_trees_all_equal(held_out[3], held_out[3])  # masked once and for all
    before = (tmp_path / "tokens").stat().st_mtime_ns
    data.load(*given)
    assert (tmp_path / "tokens").stat().st_mtime_ns == before


def test_too_little_text(tmp_path):
    tokens, paths = tmp_path / "tokens", []
    for name, told in (
        ("one", "at least two files are needed, got 1"),
        ("two", "are too few for sequences of 16"),
    ):
        paths.append(tmp_path / name)
        paths[-1].write_text(name)
        with pytest.raises(SystemExit, match=told):
            data.load(paths, tokens, 120, 16)
    assert len(list(tokens.iterdir())) == 1  # nothing half made


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
