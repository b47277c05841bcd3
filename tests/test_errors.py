"""Bad input: a ValueError that names the argument and the value."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax

NAN = float("nan")
SETTINGS = [
    ({"learning_rate": "fast"}, "learning_rate .*'fast'"),
    ({"learning_rate": NAN}, "learning_rate .*nan"),
    ({"compress_ratio": 0.0}, r"compress_ratio .*\(0.0, 1.0\].*0.0"),
    ({"compress_ratio": 1.1}, "compress_ratio .*1.1"),
    ({"compress_ratio": NAN}, "compress_ratio .*nan"),
    ({"compress_ratio": "0.1"}, "compress_ratio .*'0.1'"),
    ({"b1": 1.0}, r"b1 .*\[0.0, 1.0\).*1.0"),
    ({"b1": -0.1}, "b1 .*-0.1"),
    ({"b2": 1.5}, "b2 .*1.5"),
    ({"b2": None}, "b2 .*None"),
    ({"b3": 1.01}, r"b3 .*\[0.0, 1.0\].*1.01"),
    ({"eps": 0.0}, "eps .*0.0"),
    ({"eps": True}, "eps .*True"),
    ({"weight_decay": -0.1}, "weight_decay .*-0.1"),
    ({"sync_every": 0}, "sync_every .*at least 1.*0"),
    ({"sync_every": 2.5}, "sync_every .*integer.*2.5"),
    ({"form": "difference"}, "form .*sum, product.*'difference'"),
    ({"form": None}, "form .*None"),
    ({"selection": "random"}, "selection .*strided, permutation, bernoulli.*'random'"),
    ({"selection": 3}, "selection .*3"),
    ({"selection": slamb_jax.Strided}, "selection .*Strided"),
    ({"c_min": -1.0}, "c_min .*-1.0"),
    ({"c_min": 2.0, "c_max": 1.0}, "c_min must not exceed c_max.*2.0 and 1.0"),
    ({"c_max": NAN}, "c_max .*nan"),
    ({"min_size": -1}, "min_size .*-1"),
    ({"min_size": 10.5}, "min_size .*10.5"),
    ({"bias_correction": False}, "bias_correction=False .*form='product'"),
    ({"mu_dtype": "int32"}, "mu_dtype .*'int32'"),
    ({"mu_dtype": "float64"}, "mu_dtype .*'float64'"),
    ({"mu_dtype": "no such"}, "mu_dtype .*'no such'"),
    ({"seed": 0.5}, "seed .*0.5"),
    ({"axis_name": 0}, "axis_name .*0"),
    ({"axis_name": ["data"]}, r"axis_name .*\['data'\]"),
    ({"axis_name": ()}, r"axis_name .*\(\)"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings(settings, message):
    settings = {"learning_rate": 0.01} | settings
    with pytest.raises(ValueError, match=message):
        slamb_jax.slamb(settings.pop("learning_rate"), **settings)


CALLS = [
    (lambda: slamb_jax.accumulate(optax.sgd(1.0), 0), "every .*at least 1.*0"),
    (lambda: slamb_jax.accumulate("sgd", 2), "tx .*'sgd'"),
    (lambda: slamb_jax.Bernoulli(slack=-1.0), "slack .*-1.0"),
    (lambda: slamb_jax.replay_masks(np.ones((2, 3))), "masks .*boolean.*float64"),
    (lambda: slamb_jax.replay_masks(np.ones(3, bool)), r"masks .*\(3,\)"),
    (lambda: slamb_jax.replay_masks(np.ones((0, 3), bool)), r"masks .*\(0, 3\)"),
    (lambda: slamb_jax.elementwise_rescale("strided"), "selection .*'strided'"),
    (lambda: slamb_jax.layerwise_trust_ratio(b3=2.0), "b3 .*2.0"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, bool])
def test_leaves_that_cannot_be_stepped(dtype):
    params = {"ok": jnp.ones(3), "bad": jnp.ones(3, dtype)}
    with pytest.raises(ValueError, match=r"params must be real .* params\['bad'\]"):
        slamb_jax.slamb(0.01).init(params)


def test_masks_that_do_not_fit():
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    tx = slamb_jax.slamb(0.01, weight_decay=0.1, mask={"w": True})
    with pytest.raises(ValueError, match="mask must have the structure"):
        tx.update(params, tx.init(params), params)
    tx = slamb_jax.slamb(0.01, weight_decay=0.1, mask={"w": 1.0, "b": True})
    with pytest.raises(ValueError, match=r"mask must have bools .*1.0 at mask\['w'\]"):
        tx.update(params, tx.init(params), params)
    replay = slamb_jax.replay_masks(np.ones((4, 7), bool))
    tx = slamb_jax.slamb(0.01, selection=replay)
    with pytest.raises(ValueError, match=r"masks .*\(4, 7\).* 9 elements"):
        tx.update(params, tx.init(params), params)


def test_trees_that_do_not_match():
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    tx = slamb_jax.slamb(0.01)
    with pytest.raises(ValueError, match=r"[Dd]ict key mismatch|structure"):
        jax.jit(tx.update)({"w": params["w"]}, tx.init(params), params)
