"""An optimizer's step, compiled for a mesh of chips."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import slamb_jax
from benchmarks.chips.targets import AXIS, on_chips
from benchmarks.chips.traffic import Traffic, traffic
from benchmarks.rivals import elements
from benchmarks.shapes import Shapes, abstract
from benchmarks.step import RATE, flat_slamb
from examples.common.optimizers import dense
from slamb_jax.wire import WireReport

PAPER = slamb_jax.Exchange.paper(AXIS)
DEFAULT = slamb_jax.Exchange(AXIS)
DENSE = {
    "optax.lamb": dense(optax.lamb(RATE), AXIS),
    "optax.adamw": dense(optax.adamw(RATE), AXIS),
}


def adamw(**settings: Any) -> optax.GradientTransformationExtraArgs:
    return slamb_jax.adamw(RATE, slamb_jax.Exchange(AXIS, **settings))


OPTIMIZERS: dict[str, optax.GradientTransformationExtraArgs] = DENSE | {
    "adamw": adamw(),
    "adamw, skip_not_finite": slamb_jax.skip_not_finite(adamw(), DEFAULT),
    "adamw, in 4 bits": adamw(payload="uniform4"),
    "adamw, largest of 7": adamw(payload="largest_of_7"),
    "adamw, outer": adamw(sync_every=30, outer=optax.sgd(0.7, 0.5, nesterov=True)),
    "lamb": slamb_jax.lamb(RATE, DEFAULT),
    "slamb, as published": slamb_jax.slamb(RATE, PAPER),
    "slamb, flat chain": flat_slamb(PAPER),
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One compiled step, per chip."""

    seconds_to_compile: float
    state_bytes: int  # with the gradients
    temporary_bytes: int
    parameter_bytes: int
    traffic: Traffic
    report: WireReport


def compile_step(name: str, shapes: Shapes, mesh: Mesh) -> Step:
    """Update and apply, each worker with its own gradients, parameters and moments."""
    tx = OPTIMIZERS[name]

    def step(state: Any, grads: Any) -> tuple[Any, Any]:
        params, opt_state = state
        grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    params = abstract(shapes)
    state = params, jax.eval_shape(tx.init, params)
    run = slamb_jax.per_worker_step(step, mesh, DEFAULT, check_vma=name not in DENSE)
    start = time.perf_counter()
    compiled: Any = run.lower(*on_chips((state, params), mesh)).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Step(
        seconds_to_compile=seconds,
        state_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        parameter_bytes=4 * elements(params),
        traffic=traffic(compiled.as_text()),
        report=slamb_jax.wire_report(compiled),
    )
