"""Every argument under ``optax.inject_hyperparams``; functions, and trees like them."""

import inspect
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

import slamb_jax
from slamb_jax import jointspar
from slamb_jax.links import directions
from tests import arguments
from tests.arguments import ARGUMENTS, MASK, NUMBERS, ONE, PARAMS, SHAPES
from tests.close import assert_close
from tests.optimizers import random_tree, standard_promotion
from tests.workers import AXIS, train

GRADS = [random_tree(SHAPES, t) for t in (1, 2)]
each = pytest.mark.parametrize("make", ARGUMENTS, ids=lambda make: make.__qualname__)


def test_no_argument_is_missing_from_the_table():
    assert {*ARGUMENTS} == {make for _, make in arguments.public()}
    for make, given in ARGUMENTS.items():
        assert given.keys() == inspect.signature(make).parameters.keys()


def trained(tx, params=PARAMS, own=()):
    """Updates of two compiled steps, and the state."""
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    out = []
    for grads in GRADS:
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        updates, state = update(grads, state, params, **dict.fromkeys(own, params))
        out.append(updates)
    assert update._cache_size() == 1
    return out, state


def static_of(make, but=None):
    """What optax is told to pass on: all that are no numbers."""
    return [name for name in ARGUMENTS[make] if name not in {but, *NUMBERS}]


@each
def test_injected_every_argument_is_what_it_is_in_a_direct_call(make):
    own = ["second_moment"] if make is directions.adam else []
    # Rounding to 16 bits could fall either way: it is left to the types of the state.
    wide = {x: jnp.float32 for x in ARGUMENTS[make] if x.endswith("dtype")}
    with standard_promotion():  # optax's schedules need it
        inject = optax.inject_hyperparams(make, static_of(make))
        got, _ = trained(inject(**ARGUMENTS[make] | wide), own=own)
        want, _ = trained(make(**ARGUMENTS[make] | wide), own=own)
        assert_close(got, want, units=512)
        both = [f(**ARGUMENTS[make]).init for f in (inject, make)]
    got, want = (jax.tree.leaves(jax.eval_shape(init, PARAMS)) for init in both)
    assert [x for x in got if x.ndim] == [x for x in want if x.ndim]


def scheduled(exchange, rates, **settings):
    """The mean momentum, with a decay rate of its own at each step."""

    def momentum(b1):
        return slamb_jax.mask_momentum(
            exchange, None, b1, None, bias_correction=False, **settings
        )

    inject = optax.inject_hyperparams(momentum, hyperparam_dtype=jnp.float32)
    return inject(lambda count: jnp.asarray(rates, jnp.float32)[count])


RISING, FALLING = ((0.0, 0.0, 0.9, 0.95, 0.9), (0.95, 0.9, 0.2, 0.0, 0.0))


@pytest.mark.parametrize("rates", [RISING, FALLING], ids=["rising", "falling"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_each_step_reads_the_momentum_with_its_own_rate(rates, nesterov):
    """The recurrence of the docstring, in NumPy."""
    tx = scheduled(ONE, rates, nesterov=nesterov)
    gradients = np.random.default_rng(0).normal(size=(len(rates), 3))
    state, m = tx.init(jnp.zeros(3)), np.zeros(3)
    for b1, g in zip(rates, gradients, strict=True):
        u, state = tx.update(jnp.asarray(g, jnp.float32), state)
        m = b1 * m + (1 - b1) * g
        want = b1 * m + (1 - b1) * g if nesterov else m
        np.testing.assert_allclose(u, want, atol=1e-6)


def test_of_schedules_lion_is_optax_lion():
    rates = {"b1": lambda t: 0.9 - 0.2 * t, "b2": lambda t: 0.5 + 0.1 * t}
    with standard_promotion():
        ours = optax.inject_hyperparams(slamb_jax.lion, "exchange")(0.1, ONE, **rates)
        dense = optax.inject_hyperparams(optax.lion)(0.1, **rates)
        assert_close(trained(ours)[0], trained(dense)[0], units=4)


# A constant that is injected is that number. At 0 it counts as 0.1, so that what waits
# has a place: all but that much of the last momentum was sent.
@pytest.mark.parametrize(("b1", "of_mu"), [(0.9, 9), (0.0, 1 / 9)])
def test_of_a_schedule_in_codes_what_was_not_sent_waits(b1, of_mu):
    """What was sent and what waits came in, also where the rate is 0."""
    grads = [np.float32(random_tree({"w": (4, 60)}, t)["w"]) for t in range(12)]
    tx = scheduled(slamb_jax.Exchange(AXIS), [b1] * 12)
    sent, state = train(tx, np.zeros(60, np.float32), grads, "vmap")[-1]
    given = np.sum([g.mean(0) for g in np.float64(grads)], 0)
    waits = of_mu * np.float64(state.inner_state.mu).mean(0)
    np.testing.assert_allclose(sent[0] + waits, given, atol=1e-4)


CALLED = {"weight_dimension_numbers", "muon_weight_dimension_numbers", "layers"}
OBJECTS = {"exchange", "tx", "direction", "compressor", "param_specs"}
SETTINGS = {name for given in ARGUMENTS.values() for name in given} - NUMBERS - OBJECTS


@arguments.each_argument(SETTINGS)
def test_what_is_no_hyperparameter_is_passed_on_or_refused(make, name):
    given = ARGUMENTS[make]
    said = f"{name} must be .*static_args='{name}'"
    with pytest.raises(ValueError, match=said):  # as of a factory of one's own
        make(**given | {name: jnp.array(3)})
    if name in CALLED:
        return
    inject = optax.inject_hyperparams(make, static_of(make, but=name))
    changed = callable(given[name]) or type(given[name]) in (int, float)
    with pytest.raises(ValueError, match=said) if changed else nullcontext():
        state = jax.eval_shape(inject(**given).init, PARAMS)
        assert name not in state.hyperparams


@pytest.mark.parametrize("make", [slamb_jax.muon, directions.muon, jointspar.jointspar])
def test_where_a_called_function_cannot_be_told_another_argument_is_refused(make):
    """Of the step it may return what is a setting, too."""
    with pytest.raises(ValueError, match="with all others that are no hyp"):
        jax.eval_shape(optax.inject_hyperparams(make)(**ARGUMENTS[make]).init, PARAMS)


@arguments.each_argument(arguments.DECAY_RATES | arguments.EPSILONS)
def test_an_array_is_checked_as_its_number(make, name):
    def made(x):
        make(**ARGUMENTS[make] | {name: x})
        return x

    def constant(x):
        with jax.ensure_compile_time_eval():
            made(jnp.float32(-2) * 2)
        return x

    for wrong in (jnp.float32(-1), jnp.int32(-1), jnp.float32("nan")):
        with pytest.raises(ValueError, match=f"^{name} must be in .*, got"):
            made(wrong)
    for wrong in (jnp.bool_(True), jnp.ones(2), jnp.complex64(0.5)):
        with pytest.raises(ValueError, match=f"^{name} must be a number in .*, got"):
            made(wrong)
    with pytest.raises(ValueError, match=f"^{name} must be in .*, got .*-4"):
        jax.eval_shape(constant, 1.0)
    jax.eval_shape(made, jnp.float32(-1))  # has no value yet
    # 16 bits may round a usual value away, or its distance to 1.
    wide_enough = "bfloat16" if name in arguments.EPSILONS else "float32"
    for dtype in {"float16", "bfloat16"} - {wide_enough}:
        said = f"{name} must be of 32 bits, .*{dtype} .*hyperparam_dtype=jnp.float32"
        for call in (made, jax.jit(made)):
            with pytest.raises(ValueError, match=said):
                call(jnp.asarray(0.5, dtype))
    made(jnp.asarray(0.5, wide_enough))


OPTIMIZERS = [make for make in ARGUMENTS if "learning_rate" in ARGUMENTS[make]]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_guides_call_trains_parameters_of_16_bits(make):
    """All numbers are arrays of the state, and nothing is compiled anew."""
    own, params = ARGUMENTS[make], optax.tree.cast(PARAMS, "float16")
    given = {name: x for name, x in own.items() if isinstance(x, float | str)}
    given |= {"learning_rate": 0.01, "exchange": own["exchange"]}
    static = "ns_steps" if make is slamb_jax.muon else ()
    inject = optax.inject_hyperparams(make, static, jnp.float32)
    (got, _), (want, _) = (trained(f(**given), params) for f in (inject, make))
    # Newton-Schulz multiplies the rounding of small directions.
    assert_close(got, want, units=2, floor=1e-3)


@struct.dataclass
class Model:
    """A tree that can be called, as the models of some libraries are."""

    w: object
    kernels: object
    b: object

    def __call__(self, x):
        raise TypeError("the forward pass got no batch")


def scaled(stacked):
    exchange = slamb_jax.Exchange(stacked=stacked)
    return slamb_jax.layerwise_trust_ratio(exchange)


MODEL = Model(**PARAMS)
MADE_OF_PARAMS = CALLED | {"mask", "weight_decay_mask"}
TREES = {
    make: {name: given[name] for name in MADE_OF_PARAMS & given.keys()}
    for make, given in ARGUMENTS.items()
    if MADE_OF_PARAMS & given.keys()
}
TREES[scaled] = {"stacked": MASK}


def program(tx, params):
    update, state = jax.jit(tx.update), jax.eval_shape(tx.init, params)
    return update.lower(params, state, params).as_text()


@pytest.mark.parametrize("make", TREES, ids=lambda make: make.__qualname__)
def test_a_tree_that_can_be_called_is_a_tree(make):
    """The program is that of the function which returns it, injected too.

    b1 is a tree in both.
    """
    given = ARGUMENTS.get(make, {}) | {"param_specs": None, "b1": Model(**arguments.B1)}
    given = {x: given[x] for x in given if x in inspect.signature(make).parameters}
    if make is slamb_jax.lion:
        given["b1"] = 0.5
    trees = {name: function(MODEL) for name, function in TREES[make].items()}
    static = [name for name in given | trees if name not in NUMBERS - {"b1"}]
    with standard_promotion():
        for call in (make, optax.inject_hyperparams(make, static)):
            got, want = (call(**given | x) for x in (trees, TREES[make]))
            assert program(got, MODEL) == program(want, MODEL)


def test_a_function_may_be_a_tree_without_leaves():
    @jax.tree_util.register_static
    class Kernels:
        def __call__(self, params):
            return MASK(params)

    partial = jax.tree_util.Partial(lambda _, p: MASK(p), jnp.ones(()))
    of_mask, of_class, of_partial = (
        program(slamb_jax.adamw(0.1, ONE, mask=mask), PARAMS)
        for mask in (MASK, Kernels(), partial)
    )
    assert of_mask == of_class == of_partial
