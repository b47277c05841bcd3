"""An exchange behind the compute depends on no gradient, as compiled."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from benchmarks.chips.traffic import walk
from slamb_jax.wire.hlo import parse_hlo
from tests.optimizers import exchange, random_tree, slamb, train_step
from tests.workers import AXIS, mesh_of


def needs_text(tx):
    """For each exchange of a step's program, whether it waits for the step's text.

    The text is the only array of shape s32[2,13].
    """
    params = random_tree({"embed": (256, 48), "w": (48, 256), "b": (256,)}, 0)
    mesh, between = mesh_of(4), slamb_jax.Exchange(AXIS)

    def loss(p, text):
        logits = p["embed"][text] @ p["w"] + p["b"][None, None]
        return jnp.mean(jnp.square(logits))

    with jax.numpy_dtype_promotion("standard"):  # optax's outer optimizers need it
        state = slamb_jax.replicate((params, tx.init(params)), mesh, between)
        run = slamb_jax.per_worker_step(train_step(tx, loss), mesh, between)
        lowered = run.lower(state, jax.ShapeDtypeStruct((8, 13), jnp.int32))
    module = parse_hlo(lowered.compile().as_text())
    body = module.computations[module.entry]
    text = [k for k, x in body.items() if x.shape.startswith("s32[2,13]")]
    assert [body[name].opcode for name in text] == ["parameter"]
    for name, x in body.items():
        if any(inner.collective for inner in walk(module, x)):
            yield text[0] in ancestors(body, name)


def ancestors(body, name):
    """The instructions that one waits for, and it."""
    seen, waiting = set(), [name]
    while waiting:
        at = waiting.pop()
        if at in body and at not in seen:
            seen.add(at)
            control = re.findall(r"control-predecessors=\{(.*?)\}", body[at].attributes)
            waiting += [*body[at].operands, *re.findall(r"[\w.\-]+", " ".join(control))]
    return seen


def masked(**settings):
    return slamb(min_size=1000, sync_every=None, **settings)


def mean(**settings):
    return slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS, **settings))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (mean, {}),
        (mean, {"payload": None}),
        (mean, {"outer": optax.sgd(0.7, 0.9, nesterov=True)}),
        (mean, {"outer": optax.sgd(1.0), "sync_every": 3}),
        (mean, {"payload": None, "sync_every": 3}),
        (masked, {}),
        (masked, {"mu_dtype": "bfloat16", "form": "product"}),
    ],
)
def test_the_compiled_exchange_does_not_wait_for_the_gradient(make, settings):
    late = list(needs_text(make(overlap=True, **settings)))
    assert late
    assert not any(late)
    if not settings:  # the same program, but for the option, does wait
        assert any(needs_text(make()))


@pytest.mark.parametrize("tx", [masked(overlap=True), mean(overlap=True)])
def test_where_steps_may_be_skipped_only_the_flag_waits(tx):
    alone = list(needs_text(tx))
    found = list(needs_text(slamb_jax.skip_not_finite(tx, exchange())))
    assert sorted(found) == sorted([*alone, True])
