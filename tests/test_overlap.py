"""The exchange behind the compute: its numbers, its dependencies, its price."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax.wire.hlo import parse_hlo
from tests.close import assert_close
from tests.compiled import compile_optimized
from tests.optimizers import exchange, random_tree, slamb, train_step
from tests.workers import mesh_of, train

TREE = {"w": (12, 16), "b": (16,), "conv": (2, 3, 4, 5), "scale": ()}
N = 3


def test_nothing_is_lost_and_all_is_a_step_late():
    """The mean of m over the workers is what it is without; m itself is not."""
    grads = [random_tree(TREE, t, N) for t in range(12)]
    late, soon = (
        train(slamb(overlap=x), random_tree(TREE, 9), grads, "vmap")
        for x in (True, False)
    )
    for (_, a), (_, b) in zip(late, soon, strict=True):
        mean, want = ({k: x.mean(0) for k, x in s[0].mu.items()} for s in (a, b))
        assert_close(mean, want, floor=0.1)
    assert np.ptp(soon[-1][1][0].mu["b"], axis=0).max() == 0  # dense, agreed on
    # Of a dense leaf all but the last gradient was agreed on.
    rest = late[-1][1][0].mu["b"] - 0.1 * np.asarray(grads[-1]["b"])
    np.testing.assert_allclose(np.ptp(rest, axis=0), 0, atol=1e-6)


def program(tx):
    """The HLO of a training step; the text it reads is s32[2,13]."""
    params = random_tree({"embed": (256, 48), "w": (48, 256), "b": (256,)}, 0)
    mesh = mesh_of(4)

    def loss(p, text):
        logits = p["embed"][text] @ p["w"] + p["b"][None, None]
        return jnp.mean(jnp.square(logits))

    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange())
    run = slamb_jax.per_worker_step(train_step(tx, loss), mesh, exchange())
    text = jax.ShapeDtypeStruct((8, 13), jnp.int32)
    return compile_optimized(run.lower(state, text)).as_text()


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
            control = re.findall(r"control-predecessors=\{(.*?)\}", body[at].attributes)
            waiting += [*body[at].operands, *re.findall(r"[\w.\-]+", " ".join(control))]
        yield bool(seen & text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mu_dtype": "bfloat16", "form": "product"},
        {"selection": "permutation"},
        {"compress_ratio": {0: 0.5, 9: 0.1}},
    ],
)
def test_the_compiled_exchange_does_not_wait_for_the_gradient(changes):
    settings = {"min_size": 1000, "sync_every": None, "overlap": True} | changes
    found = list(needs_text(program(slamb(**settings))))
    assert found
    assert not any(found)
    if not changes:  # the same program, but for the option, does wait
        soon = slamb(**settings | {"overlap": False})
        assert any(needs_text(program(soon)))


def test_where_steps_may_be_skipped_only_the_flag_waits():
    tx = slamb(min_size=1000, sync_every=None, overlap=True)
    alone = list(needs_text(program(tx)))
    found = list(needs_text(program(slamb_jax.skip_not_finite(tx, exchange()))))
    assert sorted(found) == sorted([*alone, True])
