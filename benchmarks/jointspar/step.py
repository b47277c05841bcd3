"""The time of a training step of JointSpar-LARS, beside dense LARS in the same run."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import slamb_jax
from benchmarks.jointspar.models import Model
from examples.byte_lm.model import blocks

RATE = 0.1
CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


@dataclasses.dataclass(frozen=True)
class Row:
    """One budget of a model."""

    model: str
    clock: str  # of CLOCKS
    budget: float
    layers: int
    active: float  # the mean share of layers that were active
    seconds: float  # a step, in the mean, as all times
    dense_seconds: float
    frozen_seconds: float
    flops_share: float  # of the step's FLOPs, that the layers' weight gradients are

    @property
    def possible_seconds(self) -> float:
        """What not to compute the inactive layers' gradients and updates would save."""
        return (1 - self.active) * (self.dense_seconds - self.frozen_seconds)

    @property
    def realised(self) -> float:
        """The share of the possible saving that was saved."""
        return (self.dense_seconds - self.seconds) / self.possible_seconds


@dataclasses.dataclass
class Contestant:
    """A compiled step, its state, and what its steps took."""

    step: Callable[[Any, Any], Any]
    state: Any
    flops: float
    times: list[dict[str, float]] = dataclasses.field(default_factory=list)
    active: list[float] = dataclasses.field(default_factory=list)  # shares of layers

    def take_turn(self, batch: Any, *, count: bool) -> None:
        active = _active(self.state[1])
        start = {name: clock() for name, clock in CLOCKS.items()}
        self.state = jax.block_until_ready(self.step(self.state, batch))
        if count:
            took = {name: clock() - start[name] for name, clock in CLOCKS.items()}
            self.times.append(took)
            self.active.append(active)

    def mean(self, clock: str) -> float:
        return float(np.mean([took[clock] for took in self.times]))


def _active(opt_state: Any) -> float:
    if not isinstance(opt_state, slamb_jax.JointSparState):
        return 1.0
    return float(np.mean([*slamb_jax.active_layers(opt_state).values()]))


def compiled(model: Model, tx: optax.GradientTransformation, **how: bool) -> Contestant:
    """A training step of one worker: gradient, update, apply; its state is donated."""
    sparse, frozen = how.get("sparse", False), how.get("frozen", False)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        active = slamb_jax.active_layers(opt_state) if sparse else None

        def loss(trained: Any) -> jax.Array:
            return model.loss(params | trained, batch, active)

        trained = {
            name: params[name]
            for name, label in blocks(params).items()
            if label is None or not frozen
        }
        grads = jax.grad(loss)(trained)
        updates, opt_state = tx.update(grads, opt_state, trained)
        return params | optax.apply_updates(trained, updates), opt_state

    params = jax.tree.map(lambda x: x + 0, model.params)  # they will be donated
    labels = blocks(params)
    trained = {k: x for k, x in params.items() if not frozen or labels[k] is None}
    state = params, tx.init(trained)
    lowered = jax.jit(step, donate_argnums=0).lower(state, model.batch)
    program = lowered.compile()
    cost = program.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return Contestant(program, state, float(cost["flops"]))


def measure(model: Model, budgets: list[float], rounds: int) -> list[Row]:
    """All take turns: dense LARS, LARS with the layers frozen, and each budget.

    By both clocks: where something else runs on the machine, CPU time tells more.
    """
    dense = compiled(model, optax.lars(RATE))
    frozen = compiled(model, optax.lars(RATE), frozen=True)
    field = [
        compiled(
            model,
            slamb_jax.jointspar_lars(RATE, blocks, budget, horizon=rounds),
            sparse=True,
        )
        for budget in budgets
    ]
    for i in range(rounds + 2):
        for contestant in (dense, frozen, *field):
            contestant.take_turn(model.batch, count=i >= 2)
    return [
        Row(
            model=model.name,
            clock=clock,
            budget=budget,
            layers=model.layers,
            active=float(np.mean(contestant.active)),
            seconds=contestant.mean(clock),
            dense_seconds=dense.mean(clock),
            frozen_seconds=frozen.mean(clock),
            flops_share=1 - frozen.flops / dense.flops,
        )
        for clock in CLOCKS
        for budget, contestant in zip(budgets, field, strict=True)
    ]
