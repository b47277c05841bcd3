"""The exchange behind the compute: its numbers, its dependencies, its price."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slamb_jax
from slamb_jax.wire.hlo import parse_hlo
from slamb_jax.wire.report import _walk
from tests.naive import NaiveSlamb
from tests.test_naive import SELECTIONS, SHAPES, masks_at, numbered
from tests.workers import AXIS, MAPPINGS, mesh_of, random_tree, train

TREE = {"w": (12, 16), "b": (16,), "conv": (2, 3, 4, 5), "scale": ()}
N = 3


def slamb(**settings):
    settings = {"min_size": 20, "b3": 0.7, "sync_every": 3} | settings
    return slamb_jax.slamb(0.01, axis_name=AXIS, overlap=True, **settings)


@pytest.mark.parametrize("name", ["strided", "piecewise"])
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    shapes=SHAPES,
    n=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1.0, 0.5, 0.1]),
    b3=st.sampled_from([0.0, 0.7, 1.0]),
    form=st.sampled_from(["sum", "product"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 100),
)
def test_agrees_with_the_naive_version(
    name, shapes, n, ratio, b3, form, weight_decay, seed
):
    rng = np.random.default_rng(seed)
    params = [rng.normal(size=s).astype(np.float32) for s in shapes]
    grads = [
        [rng.normal(size=(n, *s)).astype(np.float32) for s in shapes] for _ in range(5)
    ]
    naive = NaiveSlamb(
        params, n, lr=0.01, b1=0.9, b2=0.99, b3=b3, eps=1e-6, c_min=0.01, c_max=1000.0,
        weight_decay=weight_decay, decays=[True] * len(shapes), form=form,
        sync_every=3, bias_correction=True, overlap=True,
    )  # fmt: skip
    selection = SELECTIONS[name](ratio, 10, seed)
    tx = slamb(
        selection=selection, b2=0.99, b3=b3, form=form, weight_decay=weight_decay
    )
    history = train(tx, params, jax.tree.map(jnp.asarray, grads), "vmap")
    leaves = numbered(shapes)
    for t, (p, state) in enumerate(history, 1):
        g = [[leaf[i] for leaf in grads[t - 1]] for i in range(n)]
        naive.step(g, masks_at(selection, leaves, t))
        for got, want in ((p, naive.p), (state[0].mu, naive.m), (state[0].nu, naive.v)):
            for j in range(len(shapes)):
                stacked = np.stack([want[i][j] for i in range(n)])
                np.testing.assert_allclose(got[j], stacked, rtol=3e-4, atol=3e-6)


def chain(**settings):
    selection = slamb_jax.Strided(0.1, 20)
    compressor = slamb_jax.randk_compress_with_error_feedback(
        selection, axis_name=AXIS, keep_residual=False
    )
    return optax.chain(
        slamb_jax.mask_momentum(compressor, **settings),
        slamb_jax.layerwise_trust_ratio(selection, 0.7, axis_name=AXIS),
        slamb_jax.elementwise_rescale(selection, 0.7, axis_name=AXIS),
        optax.scale_by_learning_rate(0.01),
        slamb_jax.average_parameters_every(3, AXIS),
    )


@pytest.mark.parametrize(
    "mapping",
    ["shard_map", *(pytest.param(m, marks=pytest.mark.long) for m in MAPPINGS[:1])],
)
def test_the_chain_of_links_does_the_same(mapping):
    params = random_tree(TREE, 9)
    grads = [random_tree(TREE, t, N) for t in range(5)]
    for a, b in zip(
        train(slamb(), params, grads, mapping),
        train(chain(overlap=True), params, grads, mapping),
        strict=True,
    ):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), a, b)


def test_nothing_is_lost_and_all_is_a_step_late():
    """The mean of m over the workers is what it is without; m itself is not."""
    params = random_tree(TREE, 9)
    grads = [random_tree(TREE, t, N) for t in range(12)]
    late, soon = (train(chain(overlap=x), params, grads, "vmap") for x in (True, False))
    for (_, a), (_, b) in zip(late, soon, strict=True):
        for x, y in zip(a[0].mu.values(), b[0].mu.values(), strict=True):
            np.testing.assert_allclose(x.mean(0), y.mean(0), rtol=1e-5, atol=1e-6)
    assert np.ptp(soon[-1][1][0].mu["b"], axis=0).max() == 0  # whole, agreed on
    # Of a whole leaf, all but the last gradient was agreed on.
    rest = late[-1][1][0].mu["b"] - 0.1 * np.asarray(grads[-1]["b"])
    np.testing.assert_allclose(np.ptp(rest, axis=0), 0, atol=1e-6)


def poisoned(t):
    grads = random_tree(TREE, t, N)
    return grads | {"w": grads["w"].at[1].set(jnp.nan)}


def test_a_poisoned_gradient_stays_with_its_worker_for_a_step():
    params = random_tree(TREE, 9)
    grads = [random_tree(TREE, 0, N), poisoned(1)]
    states = [
        train(chain(overlap=x), params, grads, "vmap")[-1][1] for x in (True, False)
    ]
    late, soon = (s[0].mu["w"] for s in states)
    assert np.isfinite(late[[0, 2]]).all()
    assert not np.isfinite(soon[[0, 2]]).all()


@pytest.mark.parametrize(
    ("selection", "mapping"),
    [
        ("top_k", "shard_map"),
        pytest.param("strided", "shard_map", marks=pytest.mark.long),
        pytest.param("top_k", "vmap", marks=pytest.mark.long),
    ],
)
def test_a_skipped_step_leaves_all_workers_untouched(mapping, selection):
    tx = slamb_jax.skip_not_finite(slamb(selection=selection), AXIS)
    params = random_tree(TREE, 9)
    good = [random_tree(TREE, t, N) for t in range(4)]
    plain = train(tx, params, good, mapping)
    skipping = train(tx, params, [*good[:2], poisoned(7), *good[2:]], mapping)
    assert skipping[2][1].total_notfinite.tolist() == [1] * N
    for a, b in [(1, 1), (1, 2), (2, 3), (3, 4)]:
        one, other = plain[a], skipping[b]
        both = (one[0], one[1].inner), (other[0], other[1].inner)
        jax.tree.map(np.testing.assert_array_equal, *both)


def program(tx):
    """The HLO of a training step; the text it reads is s32[2,13]."""
    params = random_tree({"embed": (256, 48), "w": (48, 256), "b": (256,)}, 0)
    mesh = mesh_of(4)

    def step(state, text):
        params, opt_state = state

        def loss(p):
            logits = p["embed"][text] @ p["w"] + p["b"][None, None]
            return jnp.mean(jnp.square(logits))

        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
    run = slamb_jax.per_worker_step(step, mesh, AXIS)
    text = jax.ShapeDtypeStruct((8, 13), jnp.int32)
    return run.lower(state, text).compile().as_text()


def exchanges(hlo):
    """The instructions of the entry that exchange, themselves or in a branch."""
    computations, entry = parse_hlo(hlo)
    for name, x in computations[entry].items():
        alone = {entry: {name: x}}
        if list(_walk(computations | alone, entry, conditional=False, times=1)):
            yield name


def needs_text(hlo):
    """For each exchange, whether it waits for what the step reads."""
    computations, entry = parse_hlo(hlo)
    body = computations[entry]
    text = {
        name
        for name, x in body.items()
        if x.opcode == "parameter" and x.shape.startswith("s32[2,13]")
    }
    assert len(text) == 1
    found = {}
    for name in exchanges(hlo):
        seen, waiting = set(), [name]
        while waiting:
            at = waiting.pop()
            if at in seen or at not in body:
                continue
            seen.add(at)
            waiting += body[at].operands
            if before := re.search(
                r"control-predecessors=\{(.*?)\}", body[at].attributes
            ):
                waiting += [x.strip().lstrip("%") for x in before[1].split(",")]
        found[name] = bool(seen & text)
    return list(found.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mu_dtype": "bfloat16"},
        {"selection": "top_k"},
        {"compress_ratio": {0: 0.5, 9: 0.1}},
        {"form": "product"},
    ],
)
def test_the_compiled_exchange_does_not_wait_for_the_gradient(changes):
    settings = {"min_size": 1000, "sync_every": None} | changes
    found = needs_text(program(slamb(**settings)))
    assert found
    assert not any(found)
    soon = slamb_jax.slamb(0.01, axis_name=AXIS, **settings)
    found = needs_text(program(soon))
    assert any(found)  # the same program, but for the option, does wait


def test_what_is_left_undone_by_a_skipping_wrapper():
    """It decides by the gradient whether to exchange: nothing can hide."""
    tx = slamb_jax.skip_not_finite(slamb(min_size=1000, sync_every=None), AXIS)
    found = needs_text(program(tx))
    assert all(found)


def test_the_same_bytes_travel():
    report = {
        overlap: slamb_jax.wire_report(
            program(
                slamb_jax.slamb(0.01, axis_name=AXIS, min_size=1000, overlap=overlap)
            )
        )
        for overlap in (True, False)
    }
    for conditional in (True, False):
        late, soon = (r.bytes_sent(conditional=conditional) for r in report.values())
        assert late == soon > 0
