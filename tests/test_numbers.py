"""The default steps give the losses that are on record.

A change of numbers is seen in the commit that makes it. If it was meant, record anew
with ``python -m tests.test_numbers`` and say so in the changelog; the figures of README
and guide are then of an earlier step, until their commands have run again.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.optimizers import random_tree, train_step
from tests.workers import AXIS

RECORD = Path(__file__).parent / "golden" / "losses.json"
N, STEPS = 8, 5
SHAPES = {"in": (16, 64), "b": (64,), "middle": (64, 64), "out": (64, 16)}
DEFAULT = slamb_jax.Exchange(AXIS)
CODES = slamb_jax.Exchange(AXIS, payload="uniform8")
FEW = slamb_jax.Exchange(AXIS, payload="largest_of_7")
OUTER = slamb_jax.Exchange(
    AXIS, sync_every=4, outer=optax.sgd(1.0, momentum=0.5, nesterov=True)
)
METHODS = {
    "adamw": slamb_jax.adamw(0.01, DEFAULT),
    "adamw, uniform8": slamb_jax.adamw(0.01, CODES),
    "adamw, largest_of_7": slamb_jax.adamw(0.01, FEW),
    "adamw, outer": slamb_jax.adamw(0.01, OUTER),
    "lamb": slamb_jax.lamb(0.02, DEFAULT),
    "lion": slamb_jax.lion(0.002, DEFAULT),
    "muon, uniform8": slamb_jax.muon(0.02, CODES),
    "sgd": slamb_jax.sgd(0.1, DEFAULT, momentum=0.9),
    "slamb": slamb_jax.slamb(0.02, slamb_jax.Exchange.paper(AXIS)),
}


def loss_of(params, batch):
    h = jnp.tanh(batch @ params["in"] + params["b"][None])
    h = jnp.tanh(h @ params["middle"])
    return jnp.mean((h @ params["out"] - batch) ** 2)


def losses(name):
    """The mean of the workers' losses at each step."""
    tx, params = METHODS[name], random_tree(SHAPES, 0)
    step = slamb_jax.simulated_step(train_step(tx, loss_of), N, DEFAULT)
    state = slamb_jax.simulated_replicas((params, tx.init(params)), N)
    draw = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        batch = draw.normal(size=(8 * N, 16)).astype(np.float32)
        state, each = step(state, batch)
        found.append(float(jnp.mean(each)))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_the_losses_are_those_on_record(name):
    """Rounding that differs between CPUs and jax releases moved them by up to 8e-5."""
    np.testing.assert_allclose(losses(name), json.loads(RECORD.read_text())[name], 2e-4)


if __name__ == "__main__":
    RECORD.write_text(
        json.dumps({name: losses(name) for name in METHODS}, indent=1) + "\n"
    )
