"""A Flax user's loop, in linen and in nnx, with BatchNorm statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import slamb_jax
from slamb_jax.selections import Strided
from tests.close import assert_close
from tests.optimizers import train_step
from tests.workers import AXIS, mesh_of

N = 4
PAPER = slamb_jax.Exchange(
    AXIS, payload=None, selection=Strided(0.1, min_size=16), sync_every=5
)
pytestmark = pytest.mark.usefixtures("standard_promotion")


class TrainStateWithStats(TrainState):
    batch_stats: dict


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(32)(x))
        return nn.Dense(1)(nn.relu(x))


def test_linen_train_state():
    net = Net()
    start = lambda key: net.init(key, jnp.ones((1, 6)), train=False)  # noqa: E731
    variables = jax.jit(start)(jax.random.key(0))
    state = TrainStateWithStats.create(
        apply_fn=net.apply, params=variables["params"],
        tx=slamb_jax.slamb(0.03, PAPER, b3=0.7), batch_stats=variables["batch_stats"],
    )  # fmt: skip

    def step(state, batch):
        def loss_of(params):
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["x"], train=True, mutable=["batch_stats"],
            )  # fmt: skip
            return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=stats), loss

    state = slamb_jax.replicate(state, mesh_of(N), PAPER)
    run = slamb_jax.per_worker_step(step, mesh_of(N), PAPER)
    losses = []
    for t in range(30):
        x = np.random.default_rng(t).normal(size=(8 * N, 6)).astype(np.float32)
        state, loss = run(state, {"x": x, "y": np.sin(x[:, :1])})
        losses.append(float(loss.mean()))
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    means = state.batch_stats["BatchNorm_0"]["mean"]
    assert float(jnp.ptp(means, axis=0).max()) > 0
    one = slamb_jax.consolidate(state)
    assert one.step == 30
    assert_close(one.batch_stats["BatchNorm_0"]["mean"], means.mean(0))


def test_a_step_under_nnx_jit_is_the_step():
    """On parameters as nnx has them; its loop with BatchNorm is in the guide."""
    graph, params = nnx.split(nnx.Linear(6, 1, rngs=nnx.Rngs(0)))
    exchange = slamb_jax.Exchange(AXIS)
    tx = slamb_jax.adamw(0.03, exchange)

    def loss_of(params, batch):
        return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)

    step = slamb_jax.per_worker_step(train_step(tx, loss_of), mesh_of(N), exchange)
    batch = {"x": jnp.arange(48.0).reshape(8, 6) / 48, "y": jnp.ones((8, 1))}
    ends = []
    for run in (step, nnx.jit(step)):
        state = slamb_jax.replicate((params, tx.init(params)), mesh_of(N), exchange)
        ends.append(jax.tree.map(np.asarray, run(state, batch)))
    assert_close(*ends)
    net = nnx.merge(graph, slamb_jax.consolidate(ends[0][0])[0])
    assert net(jnp.ones((2, 6))).shape == (2, 1)
