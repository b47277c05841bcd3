"""An optimizer's step, compiled for a mesh of chips."""

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import slamb_jax
from benchmarks.chips.targets import AXIS, on_chips
from benchmarks.chips.traffic import Traffic, traffic
from benchmarks.rivals import elements
from benchmarks.shapes import Shapes, abstract
from benchmarks.step import DENSE, optimizers
from slamb_jax.wire import WireReport

OPTIMIZERS = optimizers(workers=2)


class Step(NamedTuple):
    """One compiled step, per chip."""

    seconds_to_compile: float
    state_bytes: int  # with the gradients
    temporary_bytes: int
    parameter_bytes: int
    traffic: Traffic
    report: WireReport


def compile_step(name: str, shapes: Shapes, mesh: Mesh) -> Step:
    """Update and apply, each worker with its own gradients, parameters and moments."""
    tx = OPTIMIZERS[name]()

    def step(state: Any, grads: Any) -> tuple[Any, Any]:
        params, opt_state = state
        grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    params, exchange = abstract(shapes), slamb_jax.Exchange(AXIS)
    state = params, jax.eval_shape(tx.init, params)
    run = slamb_jax.per_worker_step(step, mesh, exchange, check_vma=name not in DENSE)
    start = time.perf_counter()
    compiled: Any = run.lower(*on_chips((state, params), mesh)).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    return Step(
        seconds,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        4 * elements(params),
        traffic(compiled.as_text()),
        slamb_jax.wire_report(compiled),
    )
