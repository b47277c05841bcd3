"""Wrong settings of an ``Exchange`` and of ``slamb``."""

import jax.numpy as jnp
import optax

import slamb_jax
from slamb_jax import payloads, selections
from tests.workers import P
from tests.wrong_uses.common import INF, NAN, bad, make_slamb, of, slamb

STRIDED, BF16, OUTER = selections.Strided(), "bfloat16", optax.sgd(0.7)


def function(step):
    return 0.1


ALONE = [  # the argument, what it must be, values that it must not have
    ("axis_name", "", 0, ["data"], ()),
    ("compress_ratio", r"\(0.0, 1.0\]", 1.1, -0.1, NAN),
    ("compress_ratio", "", "0.1", function, {}),
    ("compress_ratio", "step 0", {5: 0.1}),
    ("min_size", "", -1, 10.5),
    ("seed", "", 0.5, "a"),
    ("selection", "strided, permutation, bernoulli", "random"),
    ("selection", "", 3, None, selections.Strided),
    ("payload", "'uniform8'", "int8"),
    ("payload", "", True, jnp.bfloat16, jnp.dtype("float16")),
    ("payload", "", payloads.StochasticUniform),
    ("average_payload", "", jnp.dtype("bfloat16"), 8),
    ("b3", r"\[0.0, 1.0\]", 1.01, -0.01, NAN),
    ("b3", "be a number", function, "1"),
    ("overlap", "True or False", 1, "yes"),
    ("sync_every", "at least 1", 0, -10),
    ("sync_every", "integer", 2.5, True),
    ("rolling", "True or False", 1, "yes"),
    ("outer", "GradientTransformation", "sgd", optax.sgd),
    ("param_specs", "PartitionSpec", "model", P.UNCONSTRAINED),
    ("stacked", "have bools", 3),
    ("learning_rate", "", "fast", NAN, None, True, [0.1], 1j),
    ("b1", r"\[0.0, 1.0\)", 1.0, -0.1, NAN),
    ("b2", "", 1.5, None, INF),
    ("c_min", "be a number", function),
    ("c_min", "", -1.0),
    ("c_max", "", NAN, "1"),
    ("eps", "", 0.0, True, -1e-6, NAN),
    ("weight_decay", "", -0.1, NAN, "some"),
    ("form", "sum, product", "difference", None),
    ("mask", "", 3),
    ("mu_dtype", "", "int32", "float16", "float64", "no such", jnp.complex64),
    ("nu_of", "", "gradients"),
    ("nu_dtype", "", "float16", "no such"),
]

TOGETHER = [
    (slamb(payload="float16"), "payload must be None, 'bfloat16', .*'float16'"),
    (slamb(local_axis_name=0, axis_name="node"), "local_axis_name .*0"),
    (slamb(local_axis_name="device"), "local_axis_name .*'device' and None"),
    (slamb(axis_name="a", local_axis_name="a"), "local_axis_name .*'a' and 'a'"),
    (slamb(local_axis_name=("a", "b"), axis_name="b"), r"\('a', 'b'\) and 'b'"),
    (slamb(compress_ratio={0: 0.5, -5: 0.1}), "compress_ratio .*-5"),
    (slamb(compress_ratio={0: 0.5, 1.5: 0.1}), r"compress_ratio .*1\.5"),
    (slamb(compress_ratio={0: 1.5}), "compress_ratio .*1.5"),
    (slamb(compress_ratio={0: 0.0}), r"compress_ratio .*\(0.0, 1.0\].*0.0"),
    (slamb(selection=STRIDED, compress_ratio=0.5), "ratio=0.5 and sel.*cannot both be"),
    (slamb(selection=STRIDED, min_size=5), "min_size=5 and selection=Strided"),
    (slamb(selection=STRIDED, seed=1), "seed=1 and selection=Strided"),
    (slamb(average_payload=BF16, sync_every=None), "='bfloat16' needs .*sync_ev.*None"),
    (slamb(rolling=True, sync_every=None), "rolling=True needs .*sync_every.*None"),
    (slamb(outer=OUTER, sync_every=None), "outer=.*needs .*sync_every.*None"),
    (slamb(outer=OUTER, rolling=True), "rolling=True and outer cannot go together"),
    (
        slamb(average_payload="largest_of_7", compress_ratio=0, sync_every=4),
        "'largest_of_7' sends one .* lose the others",
    ),
    (slamb(compress_ratio=0, payload=BF16), "payload='bfloat16' is of the momentum"),
    (slamb(compress_ratio=0, sync_every=None, axis_name="i"), "exchange nothing .*'i'"),
    (slamb(param_specs={"w": 3}), "param_specs must have .*PartitionSpec.*got 3"),
    (slamb(param_specs=P("a"), axis_name="a"), "specs must not .*axis of the .*, 'a'"),
    (slamb(stacked={"w": "yes"}), r"stacked must have bools .*'yes' at stacked\['w'\]"),
    (slamb(c_min=2.0, c_max=1.0), "c_min must not exceed c_max.*2.0 and 1.0"),
    (slamb(bias_correction=False), "bias_correction=False .*form='product'"),
]

read = slamb_jax.Exchange.from_json
replayed = selections.replay_masks([jnp.ones((1, 3), bool)])

MADE = [
    *(
        row
        for name, wanted, *values in ALONE
        for row in bad(make_slamb, name, *values, wanted=wanted)
    ),
    *TOGETHER,
    (of(slamb_jax.slamb, 0.01, "data"), r"exchange .*Exchange.*'data': .*Exchange\('d"),
    (of(slamb_jax.slamb, 0.01, None), "exchange .*slamb_jax.Exchange, got None"),
    (of(read, "data"), "settings must be a mapping, got 'data'"),
    (of(read, {"ratio": 0.1}), "'ratio' is not a setting .*compress_ratio"),
    (of(read, {"selection": {"name": "odd"}}), "selection must have a name .*'odd'"),
    (of(read, {"selection": {"name": "strided", "k": 1}}), "selection=.*'k'"),
    (of(read, {"payload": {"name": "int8"}}), "payload must have a name .*'int8'"),
    (of(read, {"payload": {"name": "uniform8", "k": 1}}), "payload=.*'k'"),
    (slamb_jax.Exchange(stacked=function).to_json, "stacked .* JSON.* got <fun"),
    (slamb_jax.Exchange(selection=replayed).to_json, "selection .*JSON.* replay"),
]
