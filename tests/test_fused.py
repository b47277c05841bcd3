"""``scale_by_slamb`` against the chain of links that it stands for."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import slamb_jax
from slamb_jax import payloads
from tests.close import assert_close, assert_one_unit, assert_same_bits
from tests.compiled import compile_optimized
from tests.forms import links, moments
from tests.optimizers import exchange, plain, random_tree
from tests.pairwise import name_of, pairwise
from tests.workers import AXIS, P, over_workers, stack, train

N, DEVICES, STEPS = 3, 2, 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
FACTORS = {
    "form": ("sum", "product", "uncorrected"),
    "selection": ("strided", "permutation", "bernoulli", "schedule", "dense"),
    "payload": (None, "bfloat16", "uniform8", "feedback"),
    "mu_dtype": (None, "bfloat16"),
    "nu_dtype": (None, "bfloat16"),
    "nu_of": ("gradient", "momentum"),
    "weight_decay": (0.0, 0.1, "schedule"),
    "mask": (False, True),
    "clips": ((0.01, 1000.0), (0.5, 2.0)),
    "b3": (0.7, 0.0, 1.0),
    "overlap": (False, True),
    "stacked": (False, True),
    "groups": (False, True),
    "dtype": ("float32", "bfloat16"),
    "mapping": ("vmap", "shard_map", "shard_map_unchecked", "pmap"),
}
DEFAULT = {name: values[0] for name, values in FACTORS.items()}
GRID, _ = pairwise(FACTORS)


def exchange_of(row):
    ratio = {"schedule": {0: 0.5, 2: 0.25}, "dense": 1.0}.get(row["selection"], 0.25)
    drawn = row["selection"] in ("permutation", "bernoulli")
    feedback = payloads.StochasticUniform(4, block_size=16, error_feedback=True)
    return exchange(
        local_axis_name="device" if row["groups"] else None,
        compress_ratio=ratio,
        selection=row["selection"] if drawn else "strided",
        payload=feedback if row["payload"] == "feedback" else row["payload"],
        b3=row["b3"],
        overlap=row["overlap"],
        stacked={name: name == "stack" for name in SHAPES} if row["stacked"] else None,
        sync_every=None,
    )


def settings_of(row):
    decay = row["weight_decay"]
    if decay == "schedule":
        decay = lambda count: 0.1 / (1.0 + count.astype(jnp.float32))  # noqa: E731
    form = row["form"]
    return {
        "form": "product" if form == "uncorrected" else form,
        "bias_correction": form != "uncorrected",
        "weight_decay": decay,
        "mask": {name: name != "w" for name in SHAPES} if row["mask"] else None,
        "c_min": row["clips"][0],
        "c_max": row["clips"][1],
        **{name: row[name] for name in ("mu_dtype", "nu_dtype", "nu_of")},
    }


def over_groups(update, mapping, n):
    """As ``over_workers``, with gradients of shape (n, DEVICES, ...)."""
    if mapping in ("vmap", "pmap"):
        inside = jax.vmap(update, in_axes=(0, None, None), axis_name="device")
        outside = jax.vmap(inside, axis_name=AXIS)
        return jax.jit(lambda *args: jax.tree.map(lambda x: x[:, 0], outside(*args)))

    def one_of_many(grads, *rest):
        grads = jax.tree.map(lambda x: x[0, 0], grads)
        out = update(grads, *jax.tree.map(lambda x: x[0], rest))
        return jax.tree.map(lambda x: x[None], out)

    mesh = Mesh(np.array(jax.devices()[: n * DEVICES]).reshape(n, -1), (AXIS, "device"))
    run = jax.shard_map(
        one_of_many, mesh=mesh, in_specs=(P(AXIS, "device"), P(AXIS), P(AXIS)),
        out_specs=P(AXIS), check_vma=mapping == "shard_map",
    )  # fmt: skip
    return jax.jit(run)


def marked(number, row):
    """The first rows run by default, the whole grid in CI."""
    quick = number < 8 and not row["groups"]
    marks = () if quick else pytest.mark.long
    return pytest.param(row, id=name_of(row, DEFAULT), marks=marks)


@pytest.mark.parametrize("row", [marked(*row) for row in enumerate(GRID)])
def test_equals_the_chain_of_its_links(row):
    """In one program, on the same parameters and gradients, at every step."""
    between, settings = exchange_of(row), settings_of(row)
    one = slamb_jax.scale_by_slamb(between, **settings)
    many = links(between, **settings)

    def update(grads, states, params):
        outputs = [
            tx.update(grads, state, params)
            for tx, state in zip((one, many), states, strict=True)
        ]
        (u, _), (v, _) = outputs
        moved = jax.tree.map(lambda p, u: p - (0.01 * u).astype(p.dtype), params, u)
        return (u, v), tuple(state for _, state in outputs), moved

    lead, run = (N,), over_workers
    if row["groups"]:  # devices with gradients of their own, and one state
        lead, run = (N, DEVICES), over_groups

    def cast(x):
        return x.astype(row["dtype"])

    params = jax.tree.map(cast, random_tree(SHAPES, 99))
    states = stack((one.init(params), many.init(params)), N)
    params, step = stack(params, N), run(update, row["mapping"], N)
    for t in range(STEPS):
        grads = jax.tree.map(cast, random_tree(SHAPES, t, *lead))
        (u, v), states, params = step(grads, states, params)
        assert {x.dtype.name for x in u.values()} == {row["dtype"]}
        close = assert_close if row["dtype"] == "float32" else assert_one_unit
        close(v, u)
    state, (mu, nu) = states[0], moments(states[1])
    assert_close(mu, state.mu)
    assert_close(nu, state.nu)


def test_slamb_is_a_chain_of_public_parts():
    """To the bit: the scaling, the learning rate, the average of the parameters."""
    between = exchange(b3=0.9, sync_every=2)
    rate = optax.linear_schedule(0.1, 0.0, 10)
    parts = optax.chain(
        slamb_jax.scale_by_slamb(between, form="product", weight_decay=0.1),
        optax.scale_by_learning_rate(rate),
        slamb_jax.average_parameters_every(between),
    )
    whole = slamb_jax.slamb(rate, between, form="product", weight_decay=0.1)
    params, grads = random_tree(SHAPES, 9), [random_tree(SHAPES, t, N) for t in (1, 2)]
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        assert_same_bits(*(train(tx, params, grads, "vmap") for tx in (parts, whole)))


def test_keeps_no_direction_in_memory():
    """Beside the payload, the step holds no copy of a leaf (donated buffers)."""
    params = {str(i): jnp.zeros((1024, 1024)) for i in range(4)}
    tx = slamb_jax.slamb(0.01, plain())

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry, grads):
        updates, state = tx.update(grads, carry[1], carry[0])
        return optax.apply_updates(carry[0], updates), state

    compiled = compile_optimized(step.lower((params, tx.init(params)), params))
    temporary = compiled.memory_analysis().temp_size_in_bytes
    leaves = 1.4 if jax.__version_info__ >= (0, 10) else 8.4
    assert temporary < leaves * params["0"].nbytes


def temporaries(shape, tx):
    """Of a step of a single worker, in copies of the parameters."""
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    state = jax.eval_shape(tx.init, params)
    update = jax.jit(tx.update, donate_argnums=(0, 1))
    program = compile_optimized(update.lower(params, state, params))
    return program.memory_analysis().temp_size_in_bytes / (4 * math.prod(shape))


def test_a_leaf_with_an_odd_last_dimension_needs_no_more_memory():
    """Its blocks are elements, of which no age, rate or square is kept in memory."""
    tx = slamb_jax.slamb(0.1, slamb_jax.Exchange.paper())
    assert temporaries((500, 2001), tx) < 1
    assert temporaries((500, 2048), tx) < 1


FOUR_BITS = slamb_jax.payloads.StochasticUniform(bits=4, error_feedback=True)
SKIPPED = {
    "default": slamb_jax.Exchange(),
    "paper": slamb_jax.Exchange.paper(),
    "overlap": slamb_jax.Exchange.paper(overlap=True),
    "error feedback": slamb_jax.Exchange.paper(payload=FOUR_BITS),
}


@pytest.mark.parametrize("single", SKIPPED.values(), ids=SKIPPED)
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "slamb"])
def test_a_step_that_may_be_skipped_needs_no_more_memory(name, single):
    """The new state takes the place of the old one."""
    rest = {"momentum": 0.9} if name == "sgd" else {}
    tx = getattr(slamb_jax, name)(0.1, single, **rest)
    more = slamb_jax.skip_not_finite(tx, single)
    # An old jax keeps the gradient, or its squares; a conditional took 3 copies.
    copies = 0.1 if jax.__version_info__ >= (0, 10) else 2.1
    shape = (500, 2048)
    assert temporaries(shape, more) < temporaries(shape, tx) + copies
