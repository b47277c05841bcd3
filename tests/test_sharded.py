"""Parameters sharded over a second mesh axis: the numbers of unsharded ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from slamb_jax.payloads import StochasticUniform

import slamb_jax
from slamb_jax.selections import Strided
from tests.close import assert_close, assert_same_bits
from tests.forms import FORMS, chain
from tests.optimizers import plain, random_tree, slamb, step_on_gradients
from tests.shards import OLD, N, Tiled, auto, mesh_4x2
from tests.workers import AXIS, P, mesh_of, stack

ALONE = pytest.mark.filterwarnings("ignore:step changes most of the state")

SPECS = {
    "embed": P("model", None), "up": P(None, "model"), "bias": P("model"),
    "down": P("model"), "conv": P(None, None, "model"), "scale": None, "not": P(),
}  # fmt: skip
SHAPES = {
    "embed": (36, 12), "up": (12, 48), "bias": (48,), "down": (48, 12),
    "conv": (3, 2, 8, 10), "scale": (12,), "not": (12, 10),
}  # fmt: skip
RATIO, MIN_SIZE, SEED, B3, STEPS = 0.25, 60, 3, 0.6, 5
SHARDED = plain(
    AXIS, compress_ratio=RATIO, min_size=MIN_SIZE, seed=SEED, b3=B3,
    sync_every=3, param_specs=SPECS,
)  # fmt: skip
DECAY = 0.1


def trained(params, grads, tx, mesh, exchange, check_vma=True):
    step = step_on_gradients(tx)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    run = slamb_jax.per_worker_step(step, mesh, exchange, check_vma=check_vma)
    for g in grads:
        state, _ = run(state, g)
    return state


@functools.cache
def unsharded(form):
    """The whole model on each worker, one device each, with the choice of shards."""
    specs = tuple(SPECS[name] for name in sorted(SPECS))
    selection = Tiled(Strided(RATIO, MIN_SIZE, SEED), specs)
    exchange = plain(AXIS, selection=selection, b3=B3, sync_every=3)
    tx = slamb_jax.slamb(0.1, exchange, form=form, weight_decay=DECAY)
    params, grads = drawn()
    return trained(params, grads, tx, mesh_of(N), exchange)


def drawn():
    grads = [random_tree(SHAPES, t, N) for t in range(1, STEPS + 1)]
    return random_tree(SHAPES, 0), grads


def manual(params, grads, tx, check_vma=True):
    """Everything inside one shard_map over both axes."""
    tree = {name: spec or P() for name, spec in SPECS.items()}
    lead = jax.tree.map(lambda s: P(AXIS, *s), tree)
    opt_state = tx.init(params)
    like = jax.tree.structure(params)
    is_params = lambda x: jax.tree.structure(x) == like  # noqa: E731
    state_specs = jax.tree.map(
        lambda x: lead if is_params(x) else P(AXIS), opt_state, is_leaf=is_params
    )

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh_4x2(), in_specs=(lead, state_specs, lead),
        out_specs=(lead, state_specs), check_vma=check_vma,
    )  # fmt: skip
    def run(params, state, g):
        params, state, g = jax.tree.map(lambda x: x[0], (params, state, g))
        u, state = tx.update(g, state, params)
        out = optax.apply_updates(params, u), state
        return jax.tree.map(lambda x: x[None], out)

    state = stack((params, opt_state), N)
    for g in grads:
        state = run(*state, g)
    return state


CASES = [
    ("manual", "fused", "sum", True), ("auto", "fused", "product", True),
    *(
        pytest.param(how, make, form, check_vma, marks=pytest.mark.long)
        for how, make, form, check_vma in (
            ("manual", "chain", "product", False), ("auto", "chain", "sum", False),
            ("manual", "fused", "product", False), ("auto", "fused", "sum", False),
            ("manual", "chain", "sum", True), ("auto", "chain", "product", True),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("how", "make", "form", "check_vma"), CASES)
def test_shards_follow_the_unsharded_model(how, make, form, check_vma):
    if OLD and how == "auto":
        pytest.skip("needs a jax newer than 0.7")
    params, grads = drawn()
    tx = FORMS[make](0.1, SHARDED, form=form, weight_decay=DECAY)
    if how == "auto":
        got = trained(params, grads, tx, mesh_4x2(), SHARDED, check_vma)
        up = got[0]["up"].sharding
        assert up.is_equivalent_to(NamedSharding(up.mesh, P(AXIS, None, "model")), 3)
    else:
        got = manual(params, grads, tx, check_vma)
    assert_close(got[0], unsharded(form)[0], units=256)
    for name in ("mu", "nu"):
        (x,), (y,) = (optax.tree.get_all_with_path(s[1], name) for s in
                      (got, unsharded(form)))  # fmt: skip
        assert_close(x[1], y[1], units=256)


STACKED = {"a": False, "b": False, "stack": True}


MIXED = [
    {"payload": "uniform4"},
    *(
        pytest.param(settings, marks=pytest.mark.long)
        for settings in (
            {"payload": "bfloat16"},
            {"rolling": True, "average_payload": "ternary"},
            {"outer": optax.sgd(0.7, momentum=0.9), "compress_ratio": 0},
            {"payload": StochasticUniform(4, error_feedback=True)},
            {"payload": "uniform8", "average_payload": "uniform4"},
            {"payload": "uniform4", "average_payload": "bfloat16", "stacked": STACKED},
        )
    ),
]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("settings", MIXED, ids=lambda x: " ".join(map(str, x)))
def test_copies_of_an_unsharded_leaf_stay_equal(settings, check_vma):
    """Sharded and unsharded leaves share no scale of a code, and no type."""
    specs = {"a": P(None, "model"), "b": P(), "stack": P("model")}
    shapes = {"a": (7, 10), "b": (7, 9), "stack": (2, 3, 7)}
    settings = {"compress_ratio": 0.5, "min_size": 8, "sync_every": 2} | settings
    tx = slamb(0.05, param_specs=specs, b3=B3, weight_decay=DECAY, **settings)
    params = random_tree(shapes, 0)
    own = {name: P(AXIS, *spec) for name, spec in specs.items()}

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh_4x2(), in_specs=(specs, own), out_specs=own,
        check_vma=check_vma,
    )  # fmt: skip
    def run(params, scales):
        params = jax.tree.map(lambda p, s: p + 0 * s[0], params, scales)

        def step(carry, t):
            params, state = carry
            g = jax.tree.map(lambda p, s: jnp.sin(p + t) * s[0], params, scales)
            u, state = tx.update(g, state, params)
            return (optax.apply_updates(params, u), state), None

        carry = jax.lax.scan(step, (params, tx.init(params)), jnp.arange(5.0))[0]
        return jax.tree.map(lambda x: x[None], carry[0])

    out = run(params, random_tree(shapes, 1, N))["b"]
    copies = {}
    for shard in out.addressable_shards:
        copies.setdefault(shard.index[0].start, []).append(np.asarray(shard.data))
    for first, second in copies.values():
        np.testing.assert_array_equal(first, second)


@auto
@pytest.mark.long
def test_other_transformations_on_shards():
    """``on_shards`` hands any transformation the shards, as a chain of links."""
    inner = optax.chain(optax.clip(0.5), chain(0.1, SHARDED, weight_decay=DECAY))
    tx = slamb_jax.on_shards(inner, SHARDED)
    params, grads = drawn()
    got = trained(params, grads, tx, mesh_4x2(), SHARDED)
    clipped = [jax.tree.map(lambda x: jnp.clip(x, -0.5, 0.5), g) for g in grads]
    tx = slamb_jax.slamb(0.1, SHARDED, weight_decay=DECAY)
    want = trained(params, clipped, tx, mesh_4x2(), SHARDED)
    assert_close(got[0], want[0], units=256)


@auto
@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_is_skipped_on_all_shards(check_vma):
    tx = slamb_jax.skip_not_finite(FORMS["chain"](0.1, SHARDED), SHARDED)
    params, grads = drawn()
    bad = grads[1] | {"up": grads[1]["up"].at[2, 3, 40].set(jnp.nan)}
    got, want = (
        trained(params, given, tx, mesh_4x2(), SHARDED, check_vma)
        for given in ([grads[0], bad, grads[2]], [grads[0], grads[2]])
    )
    assert_same_bits((got[0], got[1].inner), (want[0], want[1].inner))
    assert got[1].total_notfinite.tolist() == [1] * N


@ALONE
@auto
@pytest.mark.parametrize("wrong", [True, False])
def test_copies_that_come_to_differ_are_refused(wrong):
    """A norm of one shard, with types not tracked, moves unsharded leaves apart."""
    clip = slamb_jax.on_shards(optax.clip_by_global_norm(1.0), SHARDED)
    tx = optax.chain(clip if wrong else optax.identity(), optax.sgd(0.1))
    params, grads = drawn()
    run = functools.partial(trained, params, grads[:1], tx, mesh_4x2(), SHARDED, False)
    if wrong:
        with pytest.raises(ValueError, match=r"\['not'\] .* differs .*'model'"):
            run()
    else:
        run()


def test_sharded_arrays_are_not_gathered_to_be_replicated():
    mesh, spec = mesh_4x2(), P(None, "model")
    big = jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(mesh, spec))
    exchange = plain(AXIS, param_specs={"w": spec})
    out = slamb_jax.replicate({"w": big}, mesh, exchange)["w"]
    assert out.addressable_shards[0].data.shape == (1, 4, 4)
    np.testing.assert_array_equal(out, np.broadcast_to(big, (N, 4, 8)))


@pytest.mark.skipif(not OLD, reason="only jax 0.7 cannot")
def test_an_old_jax_says_so():
    params, grads = drawn()
    tx = slamb_jax.slamb(0.1, SHARDED)
    with pytest.raises(NotImplementedError, match=r"newer than 0\.7, got 0\.7"):
        trained(params, grads, tx, mesh_4x2(), SHARDED)
