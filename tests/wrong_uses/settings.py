"""Wrong settings of an ``Exchange`` and of ``slamb``."""

import jax.numpy as jnp

import slamb_jax
from slamb_jax import payloads, selections
from tests.workers import P
from tests.wrong_uses.common import INF, NAN, of, slamb

STRIDED = selections.Strided()

SETTINGS = [
    # of the exchange
    ({"axis_name": 0}, "axis_name .*0"),
    ({"axis_name": ["data"]}, r"axis_name .*\['data'\]"),
    ({"axis_name": ()}, r"axis_name .*\(\)"),
    ({"local_axis_name": 0, "axis_name": "node"}, "local_axis_name .*0"),
    ({"local_axis_name": "device"}, "local_axis_name .*'device' and None"),
    ({"axis_name": "a", "local_axis_name": "a"}, "local_axis_name .*'a' and 'a'"),
    (
        {"local_axis_name": ("a", "b"), "axis_name": ("b", "c")},
        r"local_axis_name .*\('a', 'b'\) and \('b', 'c'\)",
    ),
    ({"compress_ratio": 0.0}, r"compress_ratio .*\(0.0, 1.0\].*0.0"),
    ({"compress_ratio": 1.1}, "compress_ratio .*1.1"),
    ({"compress_ratio": -0.1}, "compress_ratio .*-0.1"),
    ({"compress_ratio": NAN}, "compress_ratio .*nan"),
    ({"compress_ratio": "0.1"}, "compress_ratio .*'0.1'"),
    ({"compress_ratio": lambda step: 0.1}, "compress_ratio .*function"),
    ({"compress_ratio": {}}, "compress_ratio .*{}"),
    ({"compress_ratio": {5: 0.1}}, "compress_ratio .*step 0 .*{5: 0.1}"),
    ({"compress_ratio": {0: 0.5, -5: 0.1}}, "compress_ratio .*-5"),
    ({"compress_ratio": {0: 0.5, 1.5: 0.1}}, r"compress_ratio .*1\.5"),
    ({"compress_ratio": {0: 1.5}}, "compress_ratio .*1.5"),
    (
        {"compress_ratio": {0: 0.5, 9: 0.1}, "selection": "top_k"},
        "compress_ratio=.*top_k",
    ),
    ({"min_size": -1}, "min_size .*-1"),
    ({"min_size": 10.5}, "min_size .*10.5"),
    ({"seed": 0.5}, "seed .*0.5"),
    ({"seed": "a"}, "seed .*'a'"),
    (
        {"selection": "random"},
        "selection .*strided, permutation, bernoulli, top_k.*'random'",
    ),
    ({"selection": 3}, "selection .*3"),
    ({"selection": None}, "selection .*None"),
    ({"selection": selections.Strided}, "selection .*Strided"),
    (
        {"selection": STRIDED, "compress_ratio": 0.5},
        "compress_ratio=0.5 and selection=Strided.* cannot both be given",
    ),
    ({"selection": STRIDED, "min_size": 5}, "min_size=5 and selection=Strided"),
    ({"selection": STRIDED, "seed": 1}, "seed=1 and selection=Strided"),
    ({"payload": "int8"}, "payload .*'uniform8'.*got 'int8'"),
    ({"payload": True}, "payload .*True"),
    ({"payload": jnp.bfloat16}, "payload .*bfloat16"),
    ({"payload": jnp.dtype("float16")}, "payload .*dtype.*float16"),
    ({"payload": payloads.StochasticUniform}, "payload .*StochasticUniform"),
    ({"average_payload": jnp.dtype("bfloat16")}, "average_payload .*bfloat16"),
    ({"average_payload": 8}, "average_payload .*got 8"),
    (
        {"average_payload": "bfloat16", "sync_every": None},
        "average_payload='bfloat16' needs .*sync_every.*None",
    ),
    ({"overlap": 1}, "overlap .*True or False.*1"),
    ({"overlap": "yes"}, "overlap .*'yes'"),
    ({"sync_every": 0}, "sync_every .*at least 1.*0"),
    ({"sync_every": -10}, "sync_every .*-10"),
    ({"sync_every": 2.5}, "sync_every .*integer.*2.5"),
    ({"sync_every": True}, "sync_every .*True"),
    ({"param_specs": "model"}, "param_specs must have .*PartitionSpec.*'model'"),
    ({"param_specs": {"w": 3}}, "param_specs must have .*PartitionSpec.*got 3"),
    ({"param_specs": P.UNCONSTRAINED}, "param_specs must have .*UNCONSTRAINED"),
    (
        {"param_specs": P("data"), "axis_name": "data"},
        "param_specs must not name the axis of the workers, 'data'",
    ),
    (
        {"param_specs": P("model"), "selection": "top_k"},
        "selection='top_k' and param_specs cannot go together",
    ),
    ({"stacked": 3}, "stacked must have bools .*3"),
    ({"stacked": {"w": "yes"}}, r"stacked must have bools .*'yes' at stacked\['w'\]"),
    # of the optimizer
    ({"learning_rate": "fast"}, "learning_rate .*'fast'"),
    ({"learning_rate": NAN}, "learning_rate .*nan"),
    ({"learning_rate": None}, "learning_rate .*None"),
    ({"learning_rate": True}, "learning_rate .*True"),
    ({"learning_rate": [0.1]}, r"learning_rate .*\[0.1\]"),
    ({"learning_rate": 1j}, "learning_rate .*1j"),
    ({"b1": 1.0}, r"b1 .*\[0.0, 1.0\).*1.0"),
    ({"b1": -0.1}, "b1 .*-0.1"),
    ({"b1": NAN}, "b1 .*nan"),
    ({"b2": 1.5}, "b2 .*1.5"),
    ({"b2": None}, "b2 .*None"),
    ({"b2": INF}, "b2 .*inf"),
    ({"b3": 1.01}, r"b3 .*\[0.0, 1.0\].*1.01"),
    ({"b3": -0.01}, "b3 .*-0.01"),
    ({"b3": NAN}, "b3 .*nan"),
    ({"b3": lambda step: 0.9}, "b3 must be a number.*function"),
    ({"c_min": lambda step: 0.1}, "c_min must be a number.*function"),
    ({"c_min": -1.0}, "c_min .*-1.0"),
    ({"c_min": 2.0, "c_max": 1.0}, "c_min must not exceed c_max.*2.0 and 1.0"),
    ({"c_max": NAN}, "c_max .*nan"),
    ({"c_max": "1"}, "c_max .*'1'"),
    ({"eps": 0.0}, "eps .*0.0"),
    ({"eps": True}, "eps .*True"),
    ({"eps": -1e-6}, "eps .*-1e-06"),
    ({"eps": NAN}, "eps .*nan"),
    ({"weight_decay": -0.1}, "weight_decay .*-0.1"),
    ({"weight_decay": NAN}, "weight_decay .*nan"),
    ({"weight_decay": "some"}, "weight_decay .*'some'"),
    ({"form": "difference"}, "form .*sum, product.*'difference'"),
    ({"form": None}, "form .*None"),
    ({"mask": 3}, "mask .*3"),
    ({"bias_correction": False}, "bias_correction=False .*form='product'"),
    ({"mu_dtype": "int32"}, "mu_dtype .*'int32'"),
    ({"mu_dtype": "float16"}, "mu_dtype .*'float16'"),
    ({"mu_dtype": "float64"}, "mu_dtype .*'float64'"),
    ({"mu_dtype": "no such"}, "mu_dtype .*'no such'"),
    ({"mu_dtype": jnp.complex64}, "mu_dtype .*complex64"),
    ({"nu_of": "gradients"}, "nu_of must be .*'gradients'"),
    ({"nu_dtype": "float16"}, "nu_dtype .*'float16'"),
    ({"nu_dtype": "no such"}, "nu_dtype .*'no such'"),
]

read = slamb_jax.Exchange.from_json

MADE = [(slamb(**settings), message) for settings, message in SETTINGS] + [
    (of(slamb_jax.slamb, 0.01, "data"), r"exchange .*Exchange.*'data': .*Exchange\('d"),
    (
        of(slamb_jax.slamb, 0.01, None),
        "exchange must be a slamb_jax.Exchange, got None",
    ),
    (of(read, "data"), "settings must be a mapping, got 'data'"),
    (of(read, {"ratio": 0.1}), "'ratio' is not a setting .*compress_ratio"),
    (of(read, {"selection": {"name": "odd"}}), "selection must have a name .*'odd'"),
    (of(read, {"selection": {"name": "strided", "k": 1}}), "selection=.*'k'"),
    (of(read, {"payload": {"name": "int8"}}), "payload must have a name .*'int8'"),
    (of(read, {"payload": {"name": "uniform8", "k": 1}}), "payload=.*'k'"),
    (
        slamb_jax.Exchange(stacked=lambda params: params).to_json,
        "stacked must be .* JSON, got <function",
    ),
    (
        slamb_jax.Exchange(
            selection=selections.replay_masks([jnp.ones((1, 3), bool)])
        ).to_json,
        "selection=replay_masks.* JSON",
    ),
]
