"""Every argument under ``optax.inject_hyperparams``; functions, and trees like them."""

import dataclasses
import functools
import inspect
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax import jointspar
from slamb_jax.exchange.selections import Strided
from slamb_jax.links import directions
from tests.close import assert_close
from tests.optimizers import random_tree, standard_promotion
from tests.test_contract import public
from tests.workers import AXIS, train

PARAMS = random_tree({"w": (4, 3), "kernels": (2, 3, 4), "b": (3,)}, 0)
GRADS = [random_tree({"w": (4, 3), "kernels": (2, 3, 4), "b": (3,)}, t) for t in (1, 2)]
ONE = slamb_jax.Exchange()
PAPER = slamb_jax.Exchange.paper(selection=Strided(0.25, min_size=4))
RATE, SLOWER = (optax.linear_schedule(x, x / 2, 4) for x in (0.1, 0.02))


def of_kernels(value, other):
    return lambda params: jax.tree.map(
        lambda x: value if jnp.ndim(x) == 3 else other, params
    )


MASK, LAYERS = of_kernels(True, False), of_kernels("one", "two")
KERNELS = of_kernels(directions.DimensionNumbers(1, 2), None)
B1 = {"w": 0.8, "kernels": 0.5, "b": 0.8}
ADAM = {"b1": B1, "b2": 0.9, "mu_dtype": jnp.bfloat16}
STEP = {"learning_rate": RATE, "exchange": ONE, "weight_decay": SLOWER, "mask": MASK}
RATIO = {"form": "product", "c_min": 0.5, "c_max": 2.0}
MUON = {"ns_coeffs": ((3.0, -4.0, 2.0),) * 2, "ns_steps": 2, "eps": 1e-3,
        "consistent_rms": 0.3}  # fmt: skip
ARGUMENTS = {  # a value, other than the default, of every argument
    slamb_jax.adamw: STEP | ADAM | {"eps": 1e-3, "eps_root": 1e-3, "nesterov": True},
    slamb_jax.lamb: STEP | ADAM | RATIO | {"eps": 1e-3},
    slamb_jax.slamb: STEP | ADAM | RATIO | {
        "exchange": PAPER, "eps": 1e-3, "b3": 0.7
    },
    slamb_jax.lion: STEP | {"b1": 0.5, "b2": 0.7, "mu_dtype": jnp.bfloat16},
    slamb_jax.sgd: {
        "learning_rate": RATE, "exchange": ONE, "momentum": 0.7, "nesterov": True,
        "accumulator_dtype": jnp.bfloat16,
    },
    slamb_jax.muon: MUON | {
        "learning_rate": RATE, "exchange": ONE, "beta": 0.7, "weight_decay": 0.1,
        "weight_decay_mask": MASK, "mu_dtype": jnp.bfloat16, "nesterov": False,
        "adam_b1": 0.5, "adam_b2": 0.9, "adam_eps_root": 1e-3,
        "adam_weight_decay": SLOWER, "adam_learning_rate": SLOWER,
        "muon_weight_dimension_numbers": KERNELS,
    },
    slamb_jax.mask_momentum: ADAM | {
        "exchange": ONE, "direction": directions.adam(), "share": 0.6, "nesterov": True,
        "compressor": optax.identity(), "bias_correction": False,
    },
    slamb_jax.layerwise_trust_ratio: RATIO | {
        "exchange": PAPER, "direction": optax.scale(2.0), "b3": 0.7,
        "weight_decay": RATE, "mask": MASK,
    },
    slamb_jax.elementwise_rescale: {"exchange": PAPER, "b3": 0.7},
    slamb_jax.randk_compress_with_error_feedback: {"exchange": PAPER},
    slamb_jax.compress_with_error_feedback: {
        "compressor": slamb_jax.compressors.of_exchange(ONE), "decay": 0.5
    },
    slamb_jax.average_gradients: {"exchange": ONE},
    slamb_jax.average_parameters_every: {
        "exchange": slamb_jax.Exchange(payload=None, outer=optax.sgd(1.0)),
        "compressor": slamb_jax.compress_with_error_feedback(
            slamb_jax.compressors.of_exchange(ONE)
        ),
    },
    slamb_jax.on_shards: {"tx": optax.sgd(0.1), "exchange": ONE},
    directions.adam: {"eps": 1e-3, "eps_root": 1e-3, "eps_before_correction": True},
    directions.muon: MUON | {
        "weight_dimension_numbers": KERNELS, "param_specs": dict.fromkeys(PARAMS)
    },
    jointspar.jointspar: {
        "tx": optax.sgd(0.1), "exchange": ONE, "layers": LAYERS, "budget": 1.5,
        "p_min": 0.5, "horizon": 20, "sampling": "per_worker", "seed": 3,
    },
}  # fmt: skip
WRAPPERS = {"accumulate", "skip_not_finite"}  # take a made one
each = pytest.mark.parametrize("make", ARGUMENTS, ids=lambda make: make.__qualname__)


def test_no_argument_is_missing_from_the_table():
    names = {make.__name__ for make in ARGUMENTS}
    assert names == {name.removeprefix("directions.") for name in public()} - WRAPPERS
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


DECAY_RATES = {"b1", "b2", "b3", "adam_b1", "adam_b2", "beta", "momentum", "share"}
EPSILONS = {"eps", "eps_root", "adam_eps_root"}
NUMBERS = DECAY_RATES | EPSILONS | {  # the others are no hyperparameters
    "learning_rate", "adam_learning_rate", "weight_decay", "adam_weight_decay", "c_min",
    "c_max", "consistent_rms",
}  # fmt: skip
OBJECTS = {"exchange", "tx", "direction", "compressor", "param_specs"}
CASES = [(make, name) for make, given in ARGUMENTS.items() for name in given]
case = functools.partial(
    pytest.mark.parametrize, ("make", "name"), ids=lambda x: getattr(x, "__name__", x)
)


CALLED = {"weight_dimension_numbers", "muon_weight_dimension_numbers", "layers"}


@case([(make, name) for make, name in CASES if name not in NUMBERS | OBJECTS])
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


@case([(make, name) for make, name in CASES if name in DECAY_RATES | EPSILONS])
def test_a_number_and_an_array_of_it_are_checked_alike(make, name):
    def made(x):
        make(**ARGUMENTS[make] | {name: x})
        return x

    def constant(x):
        with jax.ensure_compile_time_eval():
            made(jnp.float32(-2) * 2)
        return x

    out = [-1.0, -1, jnp.float32(-1), jnp.int32(-1), jnp.float32("nan")]
    if name in DECAY_RATES:
        out.append(1.01 if name == "b3" else 1.0)
    for wrong in out:
        with pytest.raises(ValueError, match=f"^{name} must be in .*, got"):
            made(wrong)
    for wrong in (True, jnp.bool_(True), jnp.ones(2), 1j, jnp.complex64(0.5), "0.5"):
        with pytest.raises(ValueError, match=f"^{name} must be a number in .*, got"):
            made(wrong)
    with pytest.raises(ValueError, match=f"^{name} must be in .*, got .*-4"):
        jax.eval_shape(constant, 1.0)
    jax.eval_shape(made, jnp.float32(-1))  # has no value yet
    # 16 bits may round a usual value away, or its distance to 1.
    for dtype in ("float16",) if name in EPSILONS else ("float16", "bfloat16"):
        said = f"{name} must be of 32 bits, .*{dtype} .*hyperparam_dtype=jnp.float32"
        for call in (made, jax.jit(made)):
            with pytest.raises(ValueError, match=said):
                call(jnp.asarray(0.5, dtype))
    made(jnp.float32(0.5))


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


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["w", "kernels", "b"], meta_fields=[]
)
@dataclasses.dataclass
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
TREES = {  # where an argument is a tree like the parameters, or a function of them
    make: {name: x for name, x in given.items() if x in (MASK, LAYERS, KERNELS)}
    for make, given in ARGUMENTS.items()
}
TREES = {make: trees for make, trees in TREES.items() if trees}
TREES[scaled] = {"stacked": MASK}


def program(tx, params):
    update, state = jax.jit(tx.update), jax.eval_shape(tx.init, params)
    return update.lower(params, state, params).as_text()


@pytest.mark.parametrize("make", TREES, ids=lambda make: make.__qualname__)
def test_a_tree_that_can_be_called_is_a_tree(make):
    """The program is that of the function which returns it, injected too.

    b1 is a tree in both.
    """
    given = ARGUMENTS.get(make, {}) | {"param_specs": None, "b1": Model(**B1)}
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
