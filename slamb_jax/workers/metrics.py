"""Numbers of an exchange for a log, while it trains."""

import statistics
from collections.abc import Callable

import chex
import jax.numpy as jnp

from slamb_jax.exchange.nbytes import means_of, share
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.workers.agreement import leaves_in, momentum_agreement
from slamb_jax.workers.mesh import check_replicas, stacked


def exchange_metrics(
    exchange: Exchange, params: chex.ArrayTree
) -> Callable[[chex.ArrayTree], dict[str, float]]:
    r"""Makes a function of the state that returns numbers of the exchange for a log.

    Args:
      exchange: the exchange of the optimizer.
      params: the parameters, or their shapes and dtypes, without an axis of replicas.

    Returns:
      A function of the state of all workers, to call in each process, and seldom, since
      it averages the momenta once. It returns a dictionary:

      * ``exchange/bytes_per_step``: bytes that each of n workers sends in a step, on
        average: its share of :math:`8 P (n - 1) / n`, those of a ring all-reduce of P
        float32 gradients. :func:`wire_report` counts them in the compiled program.
      * ``exchange/share_of_float32`` and ``exchange/share_of_bfloat16``: these bytes
        over those of averaging gradients in that dtype.
      * ``exchange/agreement``: the median of :func:`momentum_agreement`, if the state
        has a momentum.
      * ``exchange/skipped_steps``: all that :func:`skip_not_finite` skipped, if the
        state has it.

    Raises:
      ValueError: if ``exchange`` is no exchange or ``params`` are empty or not floating
        point; when called, for a state without a leading axis of replicas, and if
        ``params`` had that axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> exchange, params = slamb_jax.Exchange("data"), jnp.ones((64, 100))
      >>> tx = slamb_jax.adamw(0.1, exchange)
      >>> metrics = slamb_jax.exchange_metrics(exchange, params)
      >>> step = jax.vmap(lambda g: tx.update(g, tx.init(g), g)[1], axis_name="data")
      >>> numbers = metrics(step(jnp.ones((4, 64, 100))))
      >>> print(numbers["exchange/bytes_per_step"], numbers["exchange/agreement"])
      2040.0 2.0
    """
    elements, means = means_of(check_exchange(exchange), params)
    of_float32 = share(elements, means)

    def metrics(state: chex.ArrayTree) -> dict[str, float]:
        n = check_replicas("state", state)
        momenta = leaves_in(state, "mu").values()
        if n > 1 and elements == sum(x.size for x in momenta):
            raise ValueError(
                f"params must be one copy, got {elements} elements, as many as the "
                f"momenta of all {n} workers: take those before slamb_jax.replicate, "
                "or slamb_jax.consolidate(params)"
            )
        out = {
            "exchange/bytes_per_step": of_float32 * 8 * elements * (n - 1) / n,
            "exchange/share_of_float32": of_float32,
            "exchange/share_of_bfloat16": 2 * of_float32,
        }
        if momenta:
            agreement = momentum_agreement(state).values()
            out["exchange/agreement"] = statistics.median(agreement)
        if skipped := leaves_in(state, "total_notfinite"):
            most = stacked(jnp.max, list(skipped.values())).max()
            out["exchange/skipped_steps"] = float(most)
        return out

    return metrics
