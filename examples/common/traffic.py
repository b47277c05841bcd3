"""Bytes that an optimizer sends, read off compiled programs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import slamb_jax
from slamb_jax.wire import WireReport

Make = Callable[[slamb_jax.Exchange], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that each worker sends, by the ring convention."""

    each: float  # at every step
    average: float = 0.0  # besides, at a step that averages parameters
    averages_at: Callable[[int], bool] = lambda _: False  # a step counted from 1

    def until(self, step: int) -> float:
        """Bytes sent in the first ``step`` steps."""
        averages = sum(map(self.averages_at, range(1, step + 1)))
        return self.each * step + self.average * averages


def traffic_of(
    make: Make, exchange: slamb_jax.Exchange, params: optax.Params, mesh: Mesh
) -> Traffic:
    """Compiles the optimizer alone, and reads the bytes that it sends.

    Traffic within a group of devices is left out.
    """
    alone = exchange
    if exchange.sync_every == 1 and not exchange.averages_momentum:
        # The average of the parameters is to stand in a branch, and nothing else.
        alone = dataclasses.replace(exchange, sync_every=2)
    report = report_of(make(alone), alone, params, mesh)

    local, sent = exchange.local_axis_name, []
    for average in (False, True):
        sent.append(report.bytes_sent(conditional=average))
        if isinstance(local, str):
            sent[-1] -= report.bytes_over(mesh, local, conditional=average)
    return Traffic(sent[0], sent[1], exchange.averages_at)


def report_of(
    tx: optax.GradientTransformation,
    exchange: slamb_jax.Exchange,
    params: optax.Params,
    mesh: Mesh,
) -> WireReport:
    """The report of a step that only updates, with the parameters as gradients."""

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, opt_state = state
        updates, opt_state = tx.update(params, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    n = mesh.shape[exchange.axis_name]
    shapes = jax.eval_shape(lambda p: (p, tx.init(p)), params)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape), x.dtype), shapes)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    return slamb_jax.wire_report(run.lower(state, ()))
