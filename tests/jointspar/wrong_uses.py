"""Wrong settings of JointSpar, and layers that are not there."""

from functools import partial

import jax.numpy as jnp
import optax

from slamb_jax import Exchange, jointspar
from slamb_jax.jointspar import train_if
from tests.wrong_uses.common import bad, of

PARAMS = {name: jnp.ones((2, 3)) for name in "abcd"}
LABELS = {"a": "one", "b": "two", "c": "three", "d": None}
ONE = Exchange()
FLAGS = {name: jnp.bool_(False) for name in "abc"}


def made(**settings):
    plain = {"tx": optax.lars(0.1), "exchange": ONE, "layers": LABELS, "budget": 1.5}
    return jointspar.jointspar(**plain | settings)


def init(params=PARAMS, **settings):
    return made(**settings).init(params)


def updated(exchange=ONE):
    tx = made(exchange=exchange)
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


TWO = {"a": "one", "b": "two"}
UNUSED = {  # settings of an exchange that JointSpar does not use
    "outer": optax.sgd(0.7), "local_axis_name": "local", "stacked": True,
    "payload": "uniform8",
}  # fmt: skip
LOCAL = Exchange("x", payload=None, sync_every=4)
JOINTSPAR = [
    *bad(init, "budget", 3.1, wanted=r"\(0.0, 3\]"),
    *bad(init, "p_min", 0.6, wanted=r"\(0.0, 0.5\]"),
    *(
        (of(init, exchange=Exchange("x", **{name: x})), rf"Exchange\('x'\), .*{name}=")
        for name, x in UNUSED.items()
    ),
    (of(init, exchange=LOCAL), r"Exchange\('x'\), .*sync_every=4"),
    (of(init, layers=dict.fromkeys(PARAMS)), "layers must label at least one layer"),
    (of(init, layers=LABELS | {"a": 3}), r"layers\['a'\] must be a string .* 3"),
    (of(init, layers={"a": "one"}), "layers must have the structure of the parameters"),
    (of(init, layers=LABELS | {"e": "four"}), "layers must have the structure"),
    (of(init, {"a": jnp.ones(3), "b": ()}, layers=TWO), r"names \['two'\], which no"),
    (of(updated, exchange=Exchange("data")), "axis_name='data' is not bound here"),
    (of(jointspar.active_layers, ()), "state must have one state .* got 0"),
    (lambda: jointspar.layer_probabilities([init()] * 2), "got 2"),
    (of(train_if, FLAGS, "d", abs), "no layer 'd', .*'a', 'b', 'c'"),
    (of(train_if, FLAGS, "a", abs, below=["d"]), "no layer 'd'"),
    *bad(partial(train_if, name="a", layer=abs), "active", ["a"]),
    *bad(partial(train_if, FLAGS, "a"), "layer", 3),
]
