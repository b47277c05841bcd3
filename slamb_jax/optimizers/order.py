"""Which comes first: the mean over the workers, or the direction."""

import optax

from slamb_jax._checks import check_choice
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.dense import average_gradients


def mean_first(exchange: Exchange, nu_of: str | None = None) -> bool:
    """Whether an optimizer steps along the direction of the workers' mean momentum.

    Raises:
      ValueError: for v of each worker's own gradient, with which workers would differ.
    """
    if nu_of is not None:
        check_choice("nu_of", nu_of, ("gradient", "momentum"))
    if not check_exchange(exchange).averages_momentum:
        return False
    if nu_of == "gradient" and exchange.axis_name is not None:
        raise ValueError(
            "nu_of='gradient' is of each worker's own gradient, of which the others "
            f"know nothing, and {exchange!r} steps alike on all workers: take "
            "nu_of='momentum', or an exchange with a compress_ratio or an outer "
            "optimizer, whose workers step by themselves"
        )
    return nu_of != "gradient"


def within_workers(
    exchange: Exchange,
) -> tuple[optax.GradientTransformation, ...]:
    """The first link of a chain whose workers are groups of devices; else none."""
    grouped = exchange.local_axis_name is not None
    return (average_gradients(exchange),) if grouped else ()
