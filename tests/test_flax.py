"""A Flax user's loop, in linen and in nnx, with BatchNorm statistics."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import slamb_jax
from slamb_jax.selections import Strided
from tests.close import assert_close
from tests.optimizers import standard_promotion
from tests.workers import AXIS, mesh_of

N = 4
PAPER = slamb_jax.Exchange(
    AXIS, payload=None, selection=Strided(0.1, min_size=16), sync_every=5
)
MEAN = slamb_jax.Exchange(AXIS)


@pytest.fixture(autouse=True)
def promotion():
    with standard_promotion():
        yield


def check_training(step, state, exchange):
    """Trains; returns the last state, in which every worker has its own statistics."""
    mesh = mesh_of(N)
    state = slamb_jax.replicate(state, mesh, exchange)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    losses = []
    for t in range(30):
        x = np.random.default_rng(t).normal(size=(8 * N, 6)).astype(np.float32)
        state, loss = run(state, {"x": x, "y": np.sin(x[:, :1])})
        losses.append(float(loss.mean()))
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    return state


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

    state = check_training(step, state, PAPER)
    means = state.batch_stats["BatchNorm_0"]["mean"]
    assert float(jnp.ptp(means, axis=0).max()) > 0
    one = slamb_jax.consolidate(state)
    assert one.step == 30
    assert_close(one.batch_stats["BatchNorm_0"]["mean"], means.mean(0))


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.second = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.relu(self.norm(self.first(x))))


def test_nnx_split_and_merge():
    """Under ``nnx.jit`` the step is the same."""
    tx = slamb_jax.slamb(0.03, MEAN)
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param, ...)

    def step(state, batch):
        params, rest, opt_state = state

        def loss_of(params):
            net = nnx.merge(graph, params, rest, copy=True)
            loss = jnp.mean((net(batch["x"]) - batch["y"]) ** 2)
            return loss, nnx.state(net, nnx.Not(nnx.Param))

        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), rest, opt_state), loss

    start = params, rest, tx.init(params)
    state = check_training(step, start, MEAN)
    net = nnx.merge(graph, *slamb_jax.consolidate(state)[:2])
    net.eval()
    assert net(jnp.ones((2, 6))).shape == (2, 1)
    run = slamb_jax.per_worker_step(step, mesh_of(N), MEAN)
    batch = {"x": jnp.arange(48.0).reshape(8, 6) / 48, "y": jnp.ones((8, 1))}
    ends = []
    for one in (run, nnx.jit(run)):
        state = slamb_jax.replicate(start, mesh_of(N), MEAN)
        ends.append(jax.tree.map(np.asarray, one(state, batch)))
    assert_close(*ends)
