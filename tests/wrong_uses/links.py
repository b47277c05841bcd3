"""Wrong settings of links, optimizers and wrappers; trees that do not fit; axes."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

import slamb_jax
from slamb_jax import Sent, compressors
from slamb_jax.exchange.selections import Strided
from slamb_jax.links import directions
from tests.workers import AXIS, P, mesh_of, stack
from tests.wrong_uses.common import PARAMS, bad, of, slamb


def updating(make, grads=PARAMS, params=PARAMS, like=PARAMS):
    """A call that traces an update, as in a training loop."""

    def call():
        tx = make() if callable(make) else make
        jax.eval_shape(tx.update, grads, tx.init(like), params)

    return call


def initial(make, params):
    return lambda: make().init(params)


def updates_of(tx):
    """A function of parameters, which are their own gradients."""
    return lambda params: tx.update(params, tx.init(params), params)[0]


def on_mesh(fun, *args, specs, axis=AXIS):
    """On two devices; the result varies over no axis."""
    split = jax.shard_map(fun, mesh=mesh_of(2, axis), in_specs=specs, out_specs=P())
    jax.eval_shape(split, *args)


SCALAR = {"s": jnp.ones(())}
HALF = jnp.ones(2, jnp.float16)
SPECS = {"w": P(None, "model"), "b": P()}
ALONE, PAPER = slamb_jax.Exchange(), slamb_jax.Exchange.paper()
CODED = slamb_jax.Exchange(AXIS)
LOCAL = slamb_jax.Exchange(AXIS, payload=None, sync_every=3)
randk = slamb_jax.randk_compress_with_error_feedback
momentum = partial(slamb_jax.mask_momentum, ALONE)
selected = partial(slamb_jax.mask_momentum, PAPER)
trusting = slamb_jax.layerwise_trust_ratio


def ratio(specs):
    exchange = slamb_jax.Exchange(param_specs=specs)
    return updating(of(trusting, exchange))


def muon(numbers):
    return directions.muon(weight_dimension_numbers=numbers)


def diagonal(rows, columns):
    """A matrix of which one dimension is named twice, or that lacks one."""
    numbers = directions.DimensionNumbers(rows, columns)
    return updating(of(muon, {"w": numbers, "b": None}))


def without_units():
    """A state of a single worker, under an exchange in codes."""
    tx, state = slamb_jax.adamw(0.01, CODED), slamb_jax.adamw(0.01, ALONE).init(HALF)
    jax.vmap(lambda g: tx.update(g, state, HALF)[0], axis_name=AXIS)(jnp.ones((2, 2)))


SHARDED = trusting(slamb_jax.Exchange(param_specs=SPECS))
WHOLE = of(on_mesh, updates_of(SHARDED), PARAMS, specs=P(), axis="model")
SHARDS = [
    (ratio(SPECS), "'model', and the mesh here has none"),
    (WHOLE, r"'model'\) for a leaf that does not vary over .*'model'"),
    (updating(slamb(stacked={"x": True})), "stacked must have the structure"),
    (updating(slamb(stacked=True), *[SCALAR] * 3), r"stacked must be False .*\['s'\]"),
    (ratio({"w": P(None, None, None), "b": None}), r"entry .*\(2, 3\) at .*\['w'\]"),
]

SHARDED_LOCAL = slamb_jax.Exchange(AXIS, outer=optax.sgd(1.0), param_specs=SPECS)
LINKS = [
    *(
        (of(optimizer, 0.01, PAPER), "selection=Strided.*slamb.*without one")
        for optimizer in (
            slamb_jax.adamw,
            slamb_jax.lion,
            slamb_jax.muon,
            slamb_jax.sgd,
        )
    ),
    *(
        (
            of(slamb_jax.muon, 0.01, slamb_jax.Exchange(AXIS, payload=payload)),
            f"payload='{payload}' is too coarse .*'uniform8', 'uniform4', .*or None",
        )
        for payload in ("ternary", "sign", "largest_of_7")
    ),
    *(
        row
        for optimizer in (slamb_jax.adamw, slamb_jax.lamb, slamb_jax.lion)
        for row in bad(partial(optimizer, 0.01, ALONE), "b2", None)
    ),
    (of(slamb_jax.muon, 0.01, SHARDED_LOCAL), "muon takes param_specs only .*outer="),
    (of(slamb_jax.lion, 0.01, ALONE, b2=0.0), r"b2 must be in \(0.0, 1.0\)"),
    (without_units, "payload='ternary' needs .* nu_mean.*: give jax"),
    (updating(directions.adam), "second_moment, .*mask_momentum with a b2"),
    (updating(of(momentum, directions.adam(), b2=None)), "second_moment"),
    (diagonal(0, -2), r"weight_dimension_numbers .*once, got .*\(2, 3\)"),
    (diagonal(2, 0), r"weight_dimension_numbers .*got .*\(2, 3\)"),
    (updating(of(muon, {"x": None})), "weight_dimension_numbers must have the struct"),
    (of(momentum, b1=(0.9, -0.1)), r"b1 must be in .*got -0.1"),
    (initial(of(momentum, b1={"w": 0.9}), PARAMS), "b1 must have the structure"),
    (initial(of(momentum, b1=None), PARAMS), "b1 must have the structure"),
    (
        of(momentum, b1=lambda params: 0.5),
        "b1 must be a number in .*got <function .*: optax.inject_hyperparams takes sch",
    ),
    (of(selected, share=0.5), "share=0.5 .*without a selection"),
    (of(selected, nesterov=True), "nesterov=True .*selection"),
    (updating(of(momentum, compressor=randk(PAPER))), "compressor must .* exchange of"),
    (of(randk, LOCAL), "exchange must exchange at every step, got .*sync_every=3"),
    (initial(of(trusting, ALONE, optax.ema(0.9)), PARAMS), "direction must .*no state"),
    (of(slamb_jax.average_parameters_every, ALONE), "payload='ternary' would round"),
    (of(slamb_jax.average_parameters, PARAMS, "rows"), "axis_name='rows' is not bound"),
]

top_k = compressors.top_k(0.2, AXIS)
feedback, OUTER = slamb_jax.compress_with_error_feedback, optax.sgd(1.0)
LINKS += [
    *bad(partial(compressors.top_k, axis_name=AXIS), "share", 0.0, wanted=r"\(0.0, 1"),
    *bad(partial(compressors.low_rank, axis_name=AXIS), "rank", 0, wanted="at least 1"),
    *bad(partial(compressors.top_k, 0.1), "axis_name", None, wanted="name the axis"),
    *bad(partial(compressors.low_rank, 1), "axis_name", None, wanted="name the axis"),
    *bad(feedback, "compressor", None),
    *((of(slamb_jax.average_parameters_every, exchange, compressor=feedback(top_k)),
       "compressor needs .* outer optimizer")
      for exchange in (LOCAL, slamb_jax.Exchange(AXIS, sync_every=3, outer=OUTER))),
    (updating(of(feedback, optax.identity())), r"return slamb_jax.Sent\(mean, unsent"),
]  # fmt: skip


GROUPS = slamb_jax.Exchange("node", local_axis_name=AXIS)
GRADIENTS = updates_of(slamb_jax.average_gradients(GROUPS))


def too_many_blocks():
    leaf = {"w": jax.ShapeDtypeStruct((2**31, 1), jnp.float32)}
    jax.eval_shape(updates_of(slamb(payload=None, selection=Strided(0.5))()), leaf)


def averaged_already(tx):
    """The trap: jax.grad of replicated parameters inside shard_map sums them."""
    params = {"w": PARAMS["w"]}

    def step(p, state, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(p)
        return tx.update(grads, state, p)[0]

    specs = P(), P(), P(AXIS)
    on_mesh(step, params, tx.init(params), jnp.ones((4, 2)), specs=specs)


SHORT, W, B = {"w": PARAMS["w"]}, PARAMS["w"], PARAMS["b"]
INT = B.astype("int32")
NOT_FLOATING = {"int32": INT, "bool": B.astype(bool), "1.0": 1.0, "'a'": "a"}


def sending(tx, params=PARAMS):
    """A call that traces an update of two workers."""
    update = jax.vmap(updates_of(tx), axis_name=AXIS)
    return of(jax.eval_shape, update, stack(params, 2))


def coding(encode=lambda x, *_: x, decode=lambda code, *_: code, averages=False):
    codec = compressors.Codec(encode, decode, averages)
    return sending(compressors.from_codec(codec, AXIS))


def returning(change):
    """A user's compressor that returns something else than what it was given."""

    def update(updates, state, params=None):
        tall = jax.tree.map(lambda x: x.reshape(-1, 1), updates)
        return change(Sent(updates, updates), tall), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def momentum_of(compressor):
    return slamb_jax.mask_momentum(CODED, compressor=compressor)


# Compressors whose codes, means or residuals are not what they have to be.
LINKS.append((of(compressors.from_codec, (abs, abs), AXIS), "codec must be a Codec"))
for dtype in ("int8", "int16", "int32", "uint8", "bool", "bfloat16"):
    summed = coding(lambda x, *_, to=dtype: x.astype(to), averages=True)
    LINKS.append((summed, f"encode must return float32, got {dtype}"))
for encode in (lambda x, common, own: own, lambda *_: jnp.int2(1)):
    without_bytes = coding(encode, lambda code, like, _: jnp.zeros(like.shape))
    LINKS.append((without_bytes, "encode must return arrays of bools, or of n"))
for change in (jnp.sum, jnp.ravel, lambda x: x[None], lambda x: jax.lax.complex(x, x)):
    decoded = coding(decode=lambda code, *_, change=change: change(code))
    LINKS.append((decoded, r"decode must return reals of shape"))
for link, wanted in ((feedback, "slamb_jax.Sent"), (momentum_of, r"\(")):
    for name in Sent._fields:
        sent = returning(lambda sent, tall, name=name: sent._replace(**{name: tall}))
        LINKS.append((sending(link(sent)), r"compressor must return \(.*got \("))
    both = sending(link(returning(lambda sent, tall: tall)))
    LINKS.append((both, f"compressor must return {wanted}"))
OUTSIDE = slamb_jax.Exchange(AXIS, payload=None, sync_every=2, outer=OUTER)
for sender in (top_k, compressors.low_rank(1, AXIS), compressors.of_exchange(CODED)):
    average = slamb_jax.average_parameters_every(OUTSIDE, compressor=sender)
    for params in (PARAMS, W):
        told = "give compress_with_error_feedback"
        LINKS.append((sending(average, params), told))
for sender in (
    top_k._replace(init=lambda params: {"residual": params}),
    top_k._replace(init=lambda p: jax.tree.map(jax.lax.complex, p, p)),
    optax.chain(randk(CODED), optax.identity()),
    optax.ema(0.9),
):
    keeps = initial(of(momentum_of, sender), PARAMS)
    LINKS.append((keeps, r"compressor keeps .*Sent\(mean, unsent\)"))


SLAMB = slamb(axis_name=AXIS)()
AVERAGED = r"updates\['w'\] does not vary .*averaged"
TREES = [
    *(
        (initial(slamb(), {"ok": B, "bad": value}), rf"params .*{got} .*params\['bad'")
        for got, value in NOT_FLOATING.items()
    ),
    (initial(slamb(), jax.random.key(0)), "params .*key<fry>"),
    (of(compressors.low_rank(1, AXIS).init, {"w": INT}), "params .*int32 at params"),
    *(
        (updating(slamb(), **{name: SHORT}), "(?i)dict key mismatch|structure")
        for name in ("grads", "params", "like")
    ),
    (updating(slamb(), grads={"w": W.T, "b": B}), r"\['w'\] .*\(2, 3\).*got \(3, 2\)"),
    (updating(slamb(), {"w": W, "b": INT}), r"updates .*int32 at updates\['b'\]"),
    (too_many_blocks, r"leaf of shape \(2147483648, 1\) .*int32 .*pad"),
    (updating(slamb(mask={"w": True})), "mask must have the structure of the param"),
    (updating(slamb(mask={"w": 1.0, "b": True})), "mask must have bools .*1.0 at .*w"),
    (updating(slamb(axis_name="model")), "axis_name='model' is not bound here"),
    (updating(slamb(axis_name=("data", "model"))), "axis_name=.*model.* is not bound"),
    (of(on_mesh, GRADIENTS, PARAMS, specs=P()), r"updates.'b'. does not vary .*'data'"),
    (of(averaged_already, SLAMB), AVERAGED),
    (of(averaged_already, slamb_jax.accumulate(SLAMB, 2)), AVERAGED),
]


def replicated(exchange, *links):
    """Of a training state: what else is beside a chain is no part of it."""
    tx = optax.chain(*links)
    slamb_jax.replicate((PARAMS, tx.init(PARAMS), PARAMS), mesh_of(2), exchange)


ADAMW, SCALE = slamb_jax.adamw(0.1, CODED), optax.scale(-0.1)
AVERAGE = slamb_jax.average_parameters_every(LOCAL)
SCHEDULED = optax.scale_by_schedule(lambda step: 0.5)
TWICE = "2 links in one chain exchange"
EARLY = "put (it|average_parameters_every) last"
CHAINS = [  # the exchange, links in a row, and what is said of them
    (LOCAL, (slamb_jax.mask_momentum(LOCAL), SCALE), EARLY),
    (CODED, (randk(CODED), ADAMW), TWICE),
    (CODED, (slamb_jax.mask_momentum(CODED), randk(CODED), SCALE), TWICE),
    (CODED, (ADAMW, slamb_jax.sgd(0.1, CODED)), TWICE),
    (LOCAL, (slamb_jax.lamb(0.1, LOCAL), AVERAGE), TWICE),
    (LOCAL, (AVERAGE, optax.adam(0.1)), EARLY),
    (LOCAL, (optax.adam(0.1), AVERAGE, SCHEDULED), EARLY),
]
WARNED = [(of(replicated, between, *links), said) for between, links, said in CHAINS]
WARNED += [
    (of(slamb_jax.elementwise_rescale, CODED, b3=0.9), "b3=0.9.* without a selection"),
    (initial(of(momentum, optax.sgd(0.1, 0.9)), PARAMS), "direction has a momentum"),
    (updating(of(selected, directions.adam(1e-8))), "steps of M / eps .* eps=1e-06 or"),
]
OF_OTHER_LEAVES = optax.partition(
    {"one": optax.chain(randk(CODED), optax.sgd(0.1)), "other": ADAMW},
    {"w": "one", "b": "other"},
)
RIGHT = {  # uses beside those, that are not warned of
    "a compressor": of(replicated, CODED, momentum_of(randk(CODED)), SCALE),
    "of other leaves": of(replicated, CODED, OF_OTHER_LEAVES),
    "an average last": of(replicated, LOCAL, optax.adam(0.1), AVERAGE),
    "an optimizer's own": of(replicated, LOCAL, slamb_jax.lamb(0.1, LOCAL)),
    "no b3": of(slamb_jax.elementwise_rescale, CODED),
    "an eps that is no less": updating(of(selected, directions.adam(1e-6))),
}
