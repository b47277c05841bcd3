"""The exchange behind the compute: its numbers, its dependencies, its price."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax import Exchange
from slamb_jax.wire.hlo import parse_hlo
from tests.close import assert_close, assert_same_bits
from tests.workers import AXIS, mesh_of, random_tree, train

TREE = {"w": (12, 16), "b": (16,), "conv": (2, 3, 4, 5), "scale": ()}
N = 3


def exchange_of(overlap=True, **settings):
    settings = {"min_size": 20, "sync_every": 3} | settings
    return Exchange(AXIS, overlap=overlap, **settings)


def slamb(overlap=True, **settings):
    of_slamb = {k: settings.pop(k) for k in ("mu_dtype", "form") if k in settings}
    return slamb_jax.slamb(0.01, exchange_of(overlap, **settings), **of_slamb)


def test_nothing_is_lost_and_all_is_a_step_late():
    """The mean of m over the workers is what it is without; m itself is not."""
    grads = [random_tree(TREE, t, N) for t in range(12)]
    late, soon = (
        train(slamb(x), random_tree(TREE, 9), grads, "vmap") for x in (True, False)
    )
    for (_, a), (_, b) in zip(late, soon, strict=True):
        mean, want = ({k: x.mean(0) for k, x in s[0].mu.items()} for s in (a, b))
        assert_close(mean, want, floor=0.1)
    assert np.ptp(soon[-1][1][0].mu["b"], axis=0).max() == 0  # dense, agreed on
    # Of a dense leaf all but the last gradient was agreed on.
    rest = late[-1][1][0].mu["b"] - 0.1 * np.asarray(grads[-1]["b"])
    np.testing.assert_allclose(np.ptp(rest, axis=0), 0, atol=1e-6)


def poisoned(t):
    grads = random_tree(TREE, t, N)
    return grads | {"w": grads["w"].at[1].set(jnp.nan)}


def test_a_poisoned_gradient_stays_with_its_worker_for_a_step():
    grads = [random_tree(TREE, 0, N), poisoned(1)]
    late, soon = (
        train(slamb(x), random_tree(TREE, 9), grads, "vmap")[-1][1][0].mu["w"]
        for x in (True, False)
    )
    assert np.isfinite(late[[0, 2]]).all()
    assert not np.isfinite(soon[[0, 2]]).all()


def test_a_skipped_step_leaves_all_workers_untouched():
    exchange = exchange_of(selection="top_k")
    tx = slamb_jax.skip_not_finite(slamb_jax.slamb(0.01, exchange), exchange)
    params = random_tree(TREE, 9)
    good = [random_tree(TREE, t, N) for t in range(4)]
    plain = train(tx, params, good, "shard_map")
    skipping = train(tx, params, [*good[:2], poisoned(7), *good[2:]], "shard_map")
    assert skipping[2][1].total_notfinite.tolist() == [1] * N
    for a, b in [(1, 1), (1, 2), (2, 3), (3, 4)]:
        one, other = plain[a], skipping[b]
        assert_same_bits((one[0], one[1].inner), (other[0], other[1].inner))


def program(tx, exchange, optimized):
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

    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    text = jax.ShapeDtypeStruct((8, 13), jnp.int32)
    return optimized(run.lower(state, text)).as_text()


def needs_text(hlo):
    """For each exchange of the entry, whether it waits for what the step reads."""
    module = parse_hlo(hlo)
    body = module.computations[module.entry]
    text = {
        name
        for name, x in body.items()
        if x.opcode == "parameter" and x.shape.startswith("s32[2,13]")
    }
    assert len(text) == 1
    for name, x in body.items():
        if not any(inner.collective for inner in module.within(x)):
            continue
        seen, waiting = set(), [name]
        while waiting:
            at = waiting.pop()
            if at in seen or at not in body:
                continue
            seen.add(at)
            waiting += body[at].predecessors
        yield bool(seen & text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mu_dtype": "bfloat16", "form": "product"},
        {"selection": "top_k"},
        {"compress_ratio": {0: 0.5, 9: 0.1}},
    ],
)
def test_the_compiled_exchange_does_not_wait_for_the_gradient(changes, optimized):
    settings = {"min_size": 1000, "sync_every": None} | changes
    found = list(needs_text(program(slamb(**settings), exchange_of(), optimized)))
    assert found
    assert not any(found)
    if not changes:  # the same program, but for the option, does wait
        soon = slamb(overlap=False, **settings)
        assert any(needs_text(program(soon, exchange_of(), optimized)))


def test_a_wrapper_that_skips_leaves_nothing_to_hide_behind(optimized):
    """It decides by the gradient whether to exchange."""
    exchange = exchange_of(min_size=1000, sync_every=None)
    tx = slamb_jax.skip_not_finite(slamb_jax.slamb(0.01, exchange), exchange)
    found = list(needs_text(program(tx, exchange, optimized)))
    assert found
    assert all(found)


def test_the_same_bytes_are_sent(optimized):
    late, soon = (
        slamb_jax.wire_report(
            program(slamb(overlap, min_size=1000), exchange_of(), optimized)
        )
        for overlap in (True, False)
    )
    for conditional in (True, False):
        sent = late.bytes_sent(conditional=conditional)
        assert sent == soon.bytes_sent(conditional=conditional) > 0
