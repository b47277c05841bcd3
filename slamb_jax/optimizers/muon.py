"""Muon whose workers exchange codes instead of gradients."""

import functools
from typing import Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core import checks
from slamb_jax._core.leaves import check_mask
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links import directions
from slamb_jax.links.directions.muon import NS_COEFFS, check_matrices, matrices
from slamb_jax.links.mask_momentum import mask_momentum
from slamb_jax.optimizers._chain import chain_between, check_agrees, step_by

#: Formats in which the mean of the momenta may be orthogonalized.
FINE_PAYLOADS = (None, "bfloat16", "uniform8", "uniform4")


def muon(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    *,
    ns_coeffs: tuple[float, ...] | tuple[tuple[float, ...], ...] = NS_COEFFS,
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    nesterov: bool = True,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Muon whose workers exchange codes instead of gradients.

    Matrices step along their orthogonalized momentum, which has decay rate
    :math:`\beta`; see :func:`slamb_jax.directions.muon`. Other leaves step as in
    :func:`adamw`.

    The workers agree on the mean of their momenta first, as :func:`mask_momentum`
    describes, and all of them orthogonalize this mean: the step is dense Muon's.
    Where workers step by themselves, each orthogonalizes its own momentum, and an
    ``outer`` optimizer makes it MuLoCo.

    The mean needs a ``payload`` of ``"uniform8"``, ``"uniform4"``, ``"bfloat16"`` or
    None, since orthogonalization amplifies the error of rounding: a loss of 1.638 in 8
    bits, 1.698 in 4 bits and 1.826 in three values, for dense Muon's 1.652
    (``benchmarks/README.md``).

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, in what wire format and how often: an :class:`Exchange`.
        With ``param_specs``, where workers agree, each device gathers the shards of
        its matrices, in float32, and orthogonalizes whole matrices. Stacks sharded by
        layers are not gathered.
      ns_coeffs: coefficients of the Newton-Schulz iteration.
      ns_steps: its steps.
      beta: decay rate of the matrices' momentum, in [0, 1).
      eps: added to norms, and to the root of the second moment; positive.
      weight_decay: of the matrices.
      weight_decay_mask: which matrices decay. None: all.
      mu_dtype: dtype of the momentum, None (float32) or bfloat16.
      nesterov: look one step ahead.
      adam_b1: decay rate of the other leaves' momentum, in [0, 1).
      adam_b2: decay rate of their second moment, in [0, 1).
      adam_eps_root: added under the root, not negative.
      adam_weight_decay: of the other leaves.
      adam_learning_rate: of the other leaves. None: ``learning_rate``.
      muon_weight_dimension_numbers: which leaves are matrices, and how: as in
        ``optax.contrib.muon``. None: leaves of two dimensions.
      consistent_rms: see :func:`slamb_jax.directions.muon`.

    Returns:
      A chain like that of :func:`adamw`, in which matrices and other leaves have their
      own direction, decay and rate.

    Raises:
      ValueError: as :func:`adamw`, for a mean in another ``payload``, and for
        ``param_specs`` where workers step by themselves.

    Examples:
      >>> import slamb_jax
      >>> exchange = slamb_jax.Exchange("data", payload="uniform8")
      >>> tx = slamb_jax.muon(0.02, exchange, adam_learning_rate=1e-3)

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024;
      Thérien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025.
    """
    for name, rate in (("beta", beta), ("adam_b1", adam_b1), ("adam_b2", adam_b2)):
        checks.check_decay_rate(name, rate)
    checks.check_range("adam_eps_root", adam_eps_root, 0.0, holds=checks.SMALL)
    checks.check_range("adam_weight_decay", adam_weight_decay, 0.0, schedule=True)
    if adam_learning_rate is not None:
        checks.check_range("adam_learning_rate", adam_learning_rate, schedule=True)
    checks.check_dtype("mu_dtype", mu_dtype)
    check_mask("weight_decay_mask", weight_decay_mask)
    check_matrices("muon_weight_dimension_numbers", muon_weight_dimension_numbers)
    _check_exchange(check_agrees(exchange))
    orthogonalized = directions.muon(
        ns_coeffs, ns_steps, eps, consistent_rms=consistent_rms,
        weight_dimension_numbers=muon_weight_dimension_numbers,
        param_specs=exchange.param_specs,
    )  # fmt: skip
    normalized = directions.adam(eps, adam_eps_root)
    both = {"muon": orthogonalized, "adam": normalized}
    momentum_of = functools.partial(
        mask_momentum, exchange, nesterov=nesterov, mu_dtype=mu_dtype
    )
    # Of workers that step by themselves: their matrices keep no second moment.
    alone = {
        "muon": momentum_of(orthogonalized, beta, None),
        "adam": momentum_of(normalized, adam_b1, adam_b2),
    }
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    steps = {
        "muon": step_by(learning_rate, weight_decay, weight_decay_mask),
        "adam": step_by(adam_rate, adam_weight_decay),
    }

    def make(params: optax.Params) -> optax.GradientTransformationExtraArgs:
        numbers = muon_weight_dimension_numbers
        dimensions = matrices(numbers, params, exchange.param_specs)
        labels = jax.tree.map(
            lambda _, x: "adam" if x is None else "muon", params, dimensions
        )
        partition = functools.partial(optax.partition, param_labels=lambda _: labels)
        momentum = partition(alone)
        if exchange.averages_momentum:
            # One link for both, so that one mean is taken. Its second moments, which
            # it hands to its direction, are parted as the updates are.
            direction = partition(both, mask_compatible_extra_args=True)
            b1s = jax.tree.map({"muon": beta, "adam": adam_b1}.get, labels)
            momentum = momentum_of(direction, b1s, adam_b2)
        return chain_between("muon", exchange, momentum, partition(steps))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        checks.check_params(params)
        return make(params).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(lambda p: make(p).init(p), update)


def _check_exchange(exchange: Exchange) -> None:
    """Raises where the mean is too coarse, or specs do not fit the parts of a state."""
    if exchange.rounds_momentum and exchange.payload not in FINE_PAYLOADS:
        raise ValueError(
            f"payload={exchange.payload!r} is too coarse for muon, which raises small "
            "errors with the rest: give 'uniform8', 'uniform4', 'bfloat16' or None"
        )
    if exchange.param_specs is not None and not exchange.averages_momentum:
        raise ValueError(
            "muon takes param_specs only with sync_every=1 and no outer, where all "
            f"workers orthogonalize the mean momentum, got {exchange!r}"
        )
