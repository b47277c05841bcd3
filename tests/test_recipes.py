"""Settings by name: slamb takes them, they train, and they send what they say."""

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax import recipes
from tests.workers import AXIS, random_tree, stack, stepper

N = 8
TOLD = {"FLOAT32": 0.114, "FEW_BYTES": 0.053, "LARGE_BATCH": 0.057, "NOISY": 0.086}


def names():
    return sorted(
        name for name in vars(recipes) if name[0].isalpha() and name.isupper()
    )


@pytest.mark.parametrize("name", names())
def test_they_train(name):
    rate = optax.linear_schedule(0.02, 0.0, 200)
    tx = slamb_jax.slamb(rate, axis_name=AXIS, **getattr(recipes, name))
    targets = 2.0 + jnp.arange(8.0)[:, None, None] / 8

    def worker(target):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(params - target, state, params)
            return (params + updates, state), None

        start = jnp.ones((100, 100))
        return jax.lax.scan(step, (start, tx.init(start)), length=201)[0][0]

    params = jax.vmap(worker, axis_name=AXIS)(targets)
    assert abs(params.mean() - targets.mean()) < 0.3


@pytest.mark.parametrize("name", TOLD)
def test_they_send_what_they_say(name):
    settings = getattr(recipes, name)
    params = random_tree({"w": (512, 512)}, 0)
    tx = slamb_jax.slamb(0.1, axis_name=AXIS, **settings)
    step = stepper(tx, "shard_map", N)
    every = stack(params, N)
    state = stack(tx.init(params), N)
    report = slamb_jax.wire_report(jax.jit(step).lower(every, state, every).compile())
    at_average = report.bytes_sent(conditional=True)
    sent = report.bytes_sent() + at_average / settings["sync_every"]
    assert sent / (2 * (N - 1) / N * 4 * 512**2) == pytest.approx(TOLD[name], abs=5e-4)


def test_they_can_be_read_and_overridden_but_not_changed():
    assert (recipes.BERT | {"b3": 0.5})["b3"] == 0.5
    with pytest.raises(TypeError):
        recipes.BERT["b3"] = 0.5
