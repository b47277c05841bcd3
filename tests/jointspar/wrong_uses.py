"""Wrong settings of JointSpar, and layers that are not there."""

from functools import partial

import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from slamb_jax import Exchange, jointspar, selections
from tests.wrong_uses.common import NAN, bad, of

PARAMS = {name: jnp.ones((2, 3)) for name in "abcd"}
LABELS = {"a": "one", "b": "two", "c": "three", "d": None}
ONE = Exchange()
FLAGS = {name: jnp.bool_(False) for name in "abc"}


def made(make, **settings):
    plain = {"learning_rate": 0.1, "exchange": ONE, "layers": LABELS, "budget": 1.5}
    return make(**plain | settings).init(PARAMS)


def updated(params=PARAMS, exchange=ONE):
    tx = jointspar.jointspar_lars(0.1, exchange, LABELS, 1.5)
    tx.update(PARAMS, tx.init(PARAMS), params)


def empty_layer():
    tx = jointspar.jointspar(0.1, ONE, lambda p: {"a": {"w": "one"}, "b": "two"}, 1)
    tx.init({"a": {"w": jnp.ones(3)}, "b": ()})


ALONE = [  # the argument, what it must be, values that it must not have
    ("budget", r"\(0.0, inf\]", 0),
    ("budget", r"\(0.0, 3\]", 3.1),
    ("budget", "", NAN, "1"),
    ("p_min", "", 0.0),
    ("p_min", "not exceed budget / D = 1.5 / 3 = 0.5", 0.6),
    ("horizon", "", 0),
    ("sampling", "shared, per_worker", "private"),
    ("momentum", "", 1.0),
    ("seed", "", 0.5),
    ("exchange", "slamb_jax.Exchange", "data"),
    ("learning_rate", "", "fast"),
]
UNUSED = {  # settings of an exchange that JointSpar does not use
    "outer": {"outer": optax.sgd(0.7), "sync_every": 30},
    "local_axis_name": {"local_axis_name": "local"},
    "param_specs": {"param_specs": PartitionSpec("model")},
    "stacked": {"stacked": True},
    "overlap": {"overlap": True},
    "payload": {"payload": "uniform8"},
    "selection": {"payload": None, "selection": selections.Strided(0.1)},
    "sync_every": {"payload": None, "sync_every": 4},
}
lars = partial(made, jointspar.jointspar_lars)
train_if = jointspar.train_if

JOINTSPAR = [
    *(
        row
        for make in (jointspar.jointspar, jointspar.jointspar_lars)
        for name, wanted, *values in ALONE
        for row in bad(partial(made, make), name, *values, wanted=wanted)
    ),
    *(
        (of(lars, exchange=Exchange("x", **settings)), rf"Exchange\('x'\), .*{name}=")
        for name, settings in UNUSED.items()
    ),
    *bad(lars, "weight_decay", -0.1),
    *bad(lars, "trust_coefficient", 0.0),
    *bad(lars, "eps", -1.0),
    *bad(lars, "weight_decay_mask", 3, wanted="bools"),
    *bad(lars, "trust_ratio_mask", 1.0, wanted="bools"),
    (of(lars, layers=dict.fromkeys(PARAMS)), "layers must label at least one layer"),
    (of(lars, layers=LABELS | {"a": 3}), r"layers .* strings .* 3 at layers\['a'\]"),
    (of(lars, layers={"a": "one"}), "layers must have the structure of the parameters"),
    (of(lars, layers=LABELS | {"e": "four"}), "layers must have the structure"),
    (empty_layer, "layers names 'two', of which there are no"),
    (of(updated, None), "params must be passed"),
    (of(updated, exchange=Exchange("data")), "axis_name='data' is not bound here"),
    (of(jointspar.active_layers, ()), "state must contain one state .* got 0"),
    (lambda: jointspar.layer_probabilities([lars()] * 2), "got 2"),
    (of(train_if, FLAGS, "d", abs), "no layer 'd' .*'a', 'b', 'c'"),
    (of(train_if, FLAGS, "a", abs, below=["d"]), "no layer 'd'"),
    *bad(partial(train_if, name="a", layer=abs), "active", ["a"]),
    *bad(partial(train_if, FLAGS, "a"), "layer", 3),
]
