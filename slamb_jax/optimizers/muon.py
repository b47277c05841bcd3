"""Muon whose workers exchange codes instead of gradients."""

from typing import Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._checks import check_range
from slamb_jax._ex.payloads import (
    Quantizer,
    StochasticUniform,
    resolve_payload,
)
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links import directions
from slamb_jax.links.average import average_parameters_every
from slamb_jax.links.decay import add_decayed_weights
from slamb_jax.links.dense import average_gradients
from slamb_jax.links.directions.kinds import by_kind
from slamb_jax.links.directions.muon import NS_COEFFS, matrices
from slamb_jax.links.freshness import elementwise_rescale
from slamb_jax.links.mean_momentum import average_momentum
from slamb_jax.links.moments import NuOf
from slamb_jax.links.momentum import mask_momentum
from slamb_jax.optimizers.order import mean_first, within_workers


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
    nu_of: NuOf = "momentum",
) -> optax.GradientTransformationExtraArgs:
    r"""Muon whose workers exchange codes instead of gradients.

    Matrices step along their orthogonalized momentum, which has decay rate
    :math:`\beta`; see :func:`slamb_jax.directions.muon`. Other leaves step as in
    :func:`adamw`. A single worker with ``nu_of="gradient"`` takes the steps of
    ``optax.contrib.muon``.

    In codes of fewer than 8 bits, such as the default's, each worker orthogonalizes its
    own momentum and steps by itself. Then the parameters are averaged as
    :func:`average_parameters_every` describes; with an ``outer`` optimizer that is
    MuLoCo. With an ``average_payload`` of ``"uniform8"``, ``"bfloat16"`` or None the
    mean of the momentum comes first, as :func:`average_momentum` describes, and the
    step is dense Muon's.

    .. warning::
      In codes of fewer than 8 bits the workers must draw from the same data. The mean
      of orthogonalized momenta is not the orthogonalized mean: with two of ten classes
      on each worker training fails (``python -m benchmarks.different_data``). Take
      ``average_payload="uniform8"`` there. Coarser codes of the mean momentum are no
      way out, because orthogonalization amplifies their rounding: see
      ``benchmarks/README.md``.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, what, how much and how often: an :class:`Exchange`,
        without ``param_specs``: a matrix must be on one device to be orthogonalized.
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
      nu_of: as in :func:`adamw`, of the other leaves.

    Returns:
      A chain like that of :func:`adamw`, in which matrices and other leaves have their
      own direction, decay and rate.

    Raises:
      ValueError: as :func:`adamw`, and for an exchange with ``param_specs``.

    Examples:
      >>> import slamb_jax
      >>> tx = slamb_jax.muon(0.02, slamb_jax.Exchange("data"), adam_learning_rate=1e-3)

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024;
      Thérien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025.
    """
    check_range("learning_rate", learning_rate, schedule=True)
    for name, value in (("beta", beta), ("adam_b1", adam_b1), ("adam_b2", adam_b2)):
        check_range(name, value, 0.0, 1.0, open_high=True)
    check_range("adam_eps_root", adam_eps_root, 0.0)
    if check_exchange(exchange).param_specs is not None:
        raise ValueError(
            f"param_specs={exchange.param_specs!r} and muon cannot go together: a "
            "matrix must be on one device to be orthogonalized"
        )

    def each(params: optax.Params, of_matrix: Any, of_other: Any) -> Any:
        treedef: Any = jax.tree.structure(params)
        numbers = matrices(muon_weight_dimension_numbers, params)
        kinds = [of_other if x is None else of_matrix for x in numbers]
        return treedef.unflatten(kinds)

    def kinds(params: optax.Params) -> Any:
        return each(params, "muon", "adam")

    orthogonalized = directions.muon(
        ns_coeffs,
        ns_steps,
        eps,
        weight_dimension_numbers=muon_weight_dimension_numbers,
        consistent_rms=consistent_rms,
    )
    first = not _too_coarse(exchange) and mean_first(exchange, nu_of)
    of = "shared" if first else nu_of
    adam = directions.adam(adam_b2, eps, adam_eps_root, nu_of=of)
    direction = by_kind(kinds, {"muon": orthogonalized, "adam": adam})
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    rates = {
        "muon": optax.chain(
            add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        ),
        "adam": optax.chain(
            add_decayed_weights(adam_weight_decay),
            optax.scale_by_learning_rate(adam_rate),
        ),
    }

    def memories(params: optax.Params) -> Any:
        return each(params, beta, adam_b1)

    if first:
        return optax.chain(
            *within_workers(exchange),
            average_momentum(
                exchange,
                direction,
                memories,
                adam_b2,
                nesterov=nesterov,
                mu_dtype=mu_dtype,
            ),
            by_kind(kinds, rates),
        )
    return optax.chain(
        average_gradients(exchange),
        mask_momentum(
            exchange,
            direction,
            memories,
            nesterov=nesterov,
            mu_dtype=mu_dtype,
        ),
        elementwise_rescale(exchange),
        by_kind(kinds, rates),
        average_parameters_every(exchange),
    )


def _too_coarse(exchange: Exchange) -> bool:
    """Whether the codes of a mean are too coarse to orthogonalize it."""
    payload = resolve_payload(exchange.average_payload)
    fine = isinstance(payload, StochasticUniform) and payload.bits == 8
    in_codes = exchange.averages_in_codes and isinstance(payload, Quantizer)
    return in_codes and not fine
