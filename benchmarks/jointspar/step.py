"""The time of a training step of JointSpar-LARS, beside dense LARS in the same run."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich.table import Table

from examples.byte_lm.model import ByteLM, blocks, next_byte_loss
from examples.common.tables import table
from slamb_jax import Exchange, jointspar

RATE = 0.1
ONE = Exchange()  # a single worker
WARM_UP = 2  # turns that do not count
NET = ByteLM(layers=8, width=192, heads=4, context=64)


class Model(NamedTuple):
    """Parameters, a batch, and a loss ``loss(params, batch, active)``."""

    params: Any
    batch: Any
    loss: Callable[..., jax.Array]

    @property
    def layers(self) -> int:
        """D, by the labels of :func:`examples.byte_lm.model.blocks`."""
        return sum(label is not None for label in blocks(self.params).values())


def transformer(batch: int, seed: int, net: ByteLM = NET) -> Model:
    """A decoder whose blocks are the layers that may be skipped."""
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 256, (batch, net.context + 1), np.int32)
    params = net.init(jax.random.key(seed), text[:1, :-1])["params"]
    return Model(params, text, functools.partial(next_byte_loss, net))


class Row(NamedTuple):
    """One budget; all times are means over steps."""

    budget: float
    layers: int
    active: float  # the mean share of layers that were active
    seconds: float
    dense_seconds: float
    frozen_seconds: float  # of LARS that trains none of the layers
    flops_share: float  # of the layers' weight gradients in the FLOPs of a step

    @property
    def possible(self) -> float:
        """Of the dense step, the inactive layers' weight gradients and updates."""
        return (1 - self.active) * (1 - self.frozen_seconds / self.dense_seconds)

    @property
    def saved(self) -> float:
        """The share of the dense step that was saved."""
        return 1 - self.seconds / self.dense_seconds


@dataclasses.dataclass
class Contestant:
    """A compiled step, its state, and the times of its steps."""

    step: Callable[[Any, Any], Any]
    state: Any
    flops: float
    times: list[float] = dataclasses.field(default_factory=list)
    active: list[float] = dataclasses.field(default_factory=list)  # shares of layers

    def take_turn(self, batch: Any) -> None:
        opt_state = self.state[1]
        is_sparse = isinstance(opt_state, jointspar.JointSparState)
        drawn = jointspar.active_layers(opt_state).values() if is_sparse else [1.0]
        self.active.append(float(np.mean([*drawn])))
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.step(self.state, batch))
        self.times.append(time.perf_counter() - start)

    def seconds(self) -> float:
        """The mean."""
        return float(np.mean(self.times[WARM_UP:]))


def compiled(
    model: Model, tx: optax.GradientTransformation, *, frozen: bool = False
) -> Contestant:
    """A training step of one worker, its state donated; ``frozen`` trains no layer."""
    labels = blocks(model.params)

    def trained(params: Any) -> Any:
        return {k: x for k, x in params.items() if not frozen or labels[k] is None}

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        is_sparse = isinstance(opt_state, jointspar.JointSparState)
        active = jointspar.active_layers(opt_state) if is_sparse else None
        own = trained(params)
        grads = jax.grad(lambda own: model.loss(params | own, batch, active))(own)
        updates, opt_state = tx.update(grads, opt_state, own)
        return params | optax.apply_updates(own, updates), opt_state

    params = jax.tree.map(lambda x: x + 0, model.params)  # they will be donated
    state = params, tx.init(trained(params))
    program = jax.jit(step, donate_argnums=0).lower(state, model.batch).compile()
    cost: Any = program.cost_analysis()
    return Contestant(program, state, float(cost["flops"]))


def measure(model: Model, budgets: Sequence[float], rounds: int) -> list[Row]:
    """Times dense LARS, LARS with the layers frozen, and each budget, in turns."""
    lars = optax.lars(RATE)
    dense, frozen = compiled(model, lars), compiled(model, lars, frozen=True)
    sparse = [
        compiled(model, jointspar.jointspar(lars, ONE, blocks, s, horizon=rounds))
        for s in budgets
    ]
    for _ in range(WARM_UP + rounds):
        for contestant in (dense, frozen, *sparse):
            contestant.take_turn(model.batch)
    ends = dense.seconds(), frozen.seconds(), 1 - frozen.flops / dense.flops
    return [
        Row(s, model.layers, float(np.mean(c.active[WARM_UP:])), c.seconds(), *ends)
        for s, c in zip(budgets, sparse, strict=True)
    ]


def step_table(found: Sequence[Row], title: str, machine: str) -> Table:
    rows = [
        {
            "D": str(r.layers),
            "s": f"{r.budget:g}",
            "active": f"{r.active:.2f}",
            "ms": f"{r.seconds * 1e3:.1f}",
            "/ dense": f"{1 - r.saved:.3f}",
            "saved": f"{r.saved:.3f}",
            "possible": f"{r.possible:.3f} ({(1 - r.active) * r.flops_share:.3f})",
            "realised": "" if r.active == 1 else f"{r.saved / r.possible:.0%}",
        }
        for r in found
    ]
    caption = (
        "active: the share of layers drawn; possible: the share of the dense step that "
        "the inactive layers' weight gradients and updates take, from a program "
        f"without any of them (measured; by FLOPs). {machine}"
    )
    return table(title, rows, caption)
