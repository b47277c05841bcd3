"""Bytes that an optimizer sends, read off compiled programs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh

import slamb_jax

Make = Callable[[slamb_jax.Exchange], optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that each worker sends, by the ring convention."""

    each: dict[int, float]  # at every step, from a step (counted from 0) on
    average: float = 0.0  # besides, at a step that averages parameters
    averages_at: Callable[[int], bool] = lambda _: False  # a step counted from 1

    def until(self, step: int) -> float:
        """Bytes sent in the first ``step`` steps."""
        ends = [*list(self.each)[1:], step]
        spans = zip(self.each.items(), ends, strict=True)
        sent = sum(
            each * max(0, min(end, step) - start) for (start, each), end in spans
        )
        return sent + self.average * sum(map(self.averages_at, range(1, step + 1)))


def slamb_traffic(
    make: Make, exchange: slamb_jax.Exchange, params: optax.Params, mesh: Mesh
) -> Traffic:
    """Compiles the optimizer alone, once for each ratio, and reads what it sends.

    With one ratio and H = 2 the average is the only thing that stands in a branch;
    where it rolls, nothing does, and every step sends as much. What stays within a
    group of devices is left out.
    """
    ratios, local = exchange.compress_ratio, exchange.local_axis_name
    phases = dict(ratios) if isinstance(ratios, Mapping) else {0: ratios}
    every = exchange.sync_every and (exchange.sync_every if exchange.in_turn else 2)

    def sent(k: float | None) -> tuple[float, float]:
        """At every step, and at an average."""
        alone = dataclasses.replace(
            exchange, sync_every=every, rolling=exchange.in_turn
        )
        if isinstance(exchange.selection, str):
            alone = dataclasses.replace(alone, compress_ratio=k)
        report = report_of(make(alone), alone, params, mesh)
        step, average = report.bytes_sent(), report.bytes_sent(conditional=True)
        if isinstance(local, str):
            step -= report.bytes_over(mesh, local)
            average -= report.bytes_over(mesh, local, conditional=True)
        return step, average

    found = {k: sent(k) for k in dict.fromkeys(phases.values())}
    each = {t: found[k][0] for t, k in phases.items()}
    return Traffic(each, found[phases[0]][1], exchange.averages_at)


def report_of(
    tx: optax.GradientTransformation,
    exchange: slamb_jax.Exchange,
    params: optax.Params,
    mesh: Mesh,
) -> slamb_jax.wire.WireReport:
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
