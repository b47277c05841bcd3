"""Wrong settings of an ``Exchange`` and of ``slamb``."""

import jax.numpy as jnp
import optax

import slamb_jax
from slamb_jax.exchange.selections import Strided
from tests.replay import Replay
from tests.workers import P
from tests.wrong_uses.common import NAN, bad, make_slamb, of, slamb

OUTER, PAPER = optax.sgd(0.7), {"selection": Strided(0.1), "payload": None}
read = slamb_jax.Exchange.from_json


ALONE = [  # the argument, what it must be, values that it must not have
    ("axis_name", "", 0, ["data"], ()),
    ("payload", "largest_of_2 to _127", "int8", "float16", "uniform2"),
    ("payload", "", True, jnp.bfloat16, "largest_of_1", "largest_of_128", "largest_of"),
    ("sync_every", "at least 1", 0, -10),
    ("sync_every", "integer", 2.5, True),
    ("outer", "GradientTransformation", "sgd", optax.sgd),
    ("route", "one of owners, all, got", True, "ring"),
    ("selection", r"Strided\(0.1\)", "strided", 3, Strided),
    ("param_specs", "PartitionSpec", "model", P.UNCONSTRAINED),
    ("stacked", "have bools", 3),
]

MADE = [
    (slamb(local_axis_name=0, axis_name="node"), "local_axis_name .*0"),
    (slamb(local_axis_name="device"), "local_axis_name .*local_axis_name='device'"),
    (
        slamb(axis_name="a", local_axis_name="a"),
        "local_axis_name .*local_axis_name='a'",
    ),
    (slamb(local_axis_name=("a", "b"), axis_name="b"), r"local_axis_name=\('a', 'b'\)"),
    (slamb(**PAPER, outer=OUTER), "outer must be None .*outer=.*selection="),
    (slamb(sync_every=None, axis_name="i"), "sync_every=None .* nothing, got .*'i'"),
    (slamb(outer=OUTER, sync_every=None), "outer needs .*sync_every.*None"),
    (slamb(outer=OUTER, payload="largest_of_7"), "'largest_of_7' would lose"),
    (slamb(sync_every=4), "sync_every=4 .*payload='ternary' would round.*payload=None"),
    (slamb(param_specs={"w": 3}), "param_specs must have .*PartitionSpec.*got 3"),
    (slamb(param_specs=P("a"), axis_name="a"), "specs must not .*axis of the .*\\['a'"),
    (slamb(stacked={"w": "yes"}), r"stacked must have bools .*'yes' at stacked\['w'\]"),
    (slamb(c_min=2.0, c_max=1.0), r"c_max must be in \[2.0, inf\], got 1.0"),
    (of(slamb_jax.slamb, 0.1, slamb_jax.Exchange()), "have a selection, .*jax.lamb is"),
]
MADE += [
    row
    for name, wanted, *values in ALONE
    for row in bad(make_slamb, name, *values, wanted=wanted)
]
MADE += [
    *bad(Strided, "compress_ratio", 2.0, 0.0, -0.1, NAN, "0.1"),
    *bad(Strided, "min_size", "0", -1, 10.5),
    *bad(Strided, "seed", 0.5, "a"),
    (of(slamb_jax.slamb, 0.01, "data"), r"exchange .*Exchange.*'data': .*Exchange\('d"),
    (of(slamb_jax.slamb, slamb_jax.Exchange(), 0.01), "got 0.01: a rate comes before"),
    (of(read, "data"), "settings must be a mapping, got 'data'"),
    (of(read, {"ratio": 0.1}), "do not fit: Exchange.* argument 'ratio'"),
    (of(read, {"selection": {"k": 1}}), "do not fit: Strided.* argument 'k'"),
    (of(read, {"param_specs": {"w": ["model"]}}), "param_specs .*'model'"),
    (slamb_jax.Exchange(outer=OUTER).to_json, "outer .* JSON.* Grad.*replace.*outer="),
    (slamb_jax.Exchange(stacked={"w": True}).to_json, "stacked .* JSON.*'w': True"),
    (slamb_jax.Exchange(param_specs={"w": P()}).to_json, "param_specs .* JSON.*'w'"),
    (slamb_jax.Exchange.paper(selection=Replay([])).to_json, "selection .*JSON"),
    (of(slamb_jax.Exchange().share, {}), "params must have elements, got {}"),
]
