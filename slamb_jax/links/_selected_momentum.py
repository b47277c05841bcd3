"""The momentum of workers that step by themselves: M + e, of what is selected."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core.leaves import unless
from slamb_jax._core.moments import bias, moved
from slamb_jax._core.platform_masked import computed_once_on_tpu
from slamb_jax.compressors.of_exchange import replace_selected
from slamb_jax.exchange.blocks import AtStep
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links._compressor import Compress
from slamb_jax.links._mean_momentum import Exchanged, Row, Rule, SecondMoment


def step_alone(
    exchange: Exchange,
    rule: Rule,
    rows: list[Row],
    second: SecondMoment | None,
    at: AtStep,
    skip: jax.Array | None,
    compress: Compress | None,
) -> Exchanged:
    """The step takes M + e, which the worker keeps; v is of its own gradient."""
    leaves = [row.leaf for row in rows]
    compressed: optax.OptState = optax.EmptyState()

    def grown(ms: list[jax.Array]) -> Any:
        pairs = zip(rows, ms, strict=True)
        new = [moved(m, row.g, row.b1).astype(m.dtype) for row, m in pairs]
        return unless(skip, ms, new)

    def send(ms: list[jax.Array]) -> Any:
        nonlocal compressed
        if compress is None:
            return replace_selected(exchange, at, ms, leaves, skip)
        out = compress(ms)  # which may differ in dtype: m keeps its own
        compressed = out.state
        pairs = zip(out.in_place, ms, strict=True)
        return unless(skip, ms, [x.astype(m.dtype) for x, m in pairs])

    # With overlap what is sent need not wait for this step's gradient.
    old = [row.m for row in rows]
    mus = grown(send(old)) if exchange.overlap else send(grown(old))
    # To agree on v would be to send it. What is fresh of m is of all workers, and is
    # divided by a v that is larger by their noise.
    if second is not None:
        gs = [row.g.astype(jnp.float32) for row in rows]
        second = second.after(gs, leaves, at.step, skip)
        if skip is None:  # else a TPU keeps more after a barrier
            once = list(map(computed_once_on_tpu, second.nus))
            second = second._replace(nus=once)
    # Factors, and not corrected moments, so that a direction may read m and v where
    # they lie: m / (1 - b1^t) would be one more array of the parameters' size.
    one = jnp.float32(1)
    of_mus, of_nu = [one] * len(rows), one
    if rule.bias_correction:
        of_mus = [1 / bias(row.b1, at.step) for row in rows]
        of_nu = one if second is None else 1 / bias(second.b2, at.step)
    pairs = zip(of_mus, mus, strict=True)
    means = [of_mu * mu.astype(jnp.float32) for of_mu, mu in pairs]
    return Exchanged(means, mus, of_mus, second, of_nu, compressed)
