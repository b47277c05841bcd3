"""Muon whose workers exchange codes instead of gradients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core.checks import SMALL, check_decay_rate, check_range
from slamb_jax._core.hyperparameters import static
from slamb_jax._core.leaves import check_mask, map_present
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links import directions
from slamb_jax.links.decay import add_decayed_weights
from slamb_jax.links.directions._matrices import check_matrices, matrices
from slamb_jax.links.directions.kinds import by_kind
from slamb_jax.links.directions.muon import NS_COEFFS
from slamb_jax.links.mask_momentum import UNIT_DECAY, mask_momentum
from slamb_jax.optimizers._chain import chain_between, check_agrees, scale_by_rate

_LEAST = np.float32(0.1)  # a root counts as so much of its leaf's, at least
_TINY = np.finfo(np.float32).tiny


@static(
    "ns_coeffs", "ns_steps", "weight_decay_mask", "mu_dtype", "nesterov",
    "muon_weight_dimension_numbers",
)  # fmt: skip
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

    With a ``payload`` of ``"uniform8"``, ``"bfloat16"`` or None the workers agree on
    the mean of their momenta first, as :func:`mask_momentum` describes, and the step
    is dense Muon's. In codes of fewer than 8 bits, such as the default's, each worker
    orthogonalizes its own momentum, and the workers agree on the mean of these
    directions, in the same way. All of them take the same step in both cases. Where
    workers step by themselves, an ``outer`` optimizer makes it MuLoCo.

    .. warning::
      In codes of fewer than 8 bits the workers must draw from the same data. The mean
      of orthogonalized momenta is not the orthogonalized mean: with two of ten classes
      on each worker training fails (``python -m benchmarks.different_data``). Take
      ``payload="uniform8"`` there. Coarser codes of the mean momentum are no
      way out, because orthogonalization amplifies their rounding: see
      ``benchmarks/README.md``.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, in what wire format and how often: an :class:`Exchange`.
        With ``param_specs`` the ``payload`` must be ``"uniform8"``, ``"bfloat16"`` or
        None; each device gathers the shards of its matrices, in float32, and
        orthogonalizes whole matrices. Stacks sharded by layers are not gathered.
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
      ValueError: as :func:`adamw`, and for ``param_specs`` where each worker
        orthogonalizes its own momentum.

    Examples:
      >>> import slamb_jax
      >>> tx = slamb_jax.muon(0.02, slamb_jax.Exchange("data"), adam_learning_rate=1e-3)

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024;
      Thérien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025.
    """
    check_range("learning_rate", learning_rate, schedule=True)
    for name, value in (("beta", beta), ("adam_b1", adam_b1), ("adam_b2", adam_b2)):
        check_decay_rate(name, value)
    check_range("adam_eps_root", adam_eps_root, 0.0, holds=SMALL)
    check_range("adam_weight_decay", adam_weight_decay, 0.0, schedule=True)
    check_mask("weight_decay_mask", weight_decay_mask)
    check_matrices("muon_weight_dimension_numbers", muon_weight_dimension_numbers)
    if adam_learning_rate is not None:
        check_range("adam_learning_rate", adam_learning_rate, schedule=True)
    check_agrees(exchange)
    orthogonalized = directions.muon(
        ns_coeffs,
        ns_steps,
        eps,
        weight_dimension_numbers=muon_weight_dimension_numbers,
        consistent_rms=consistent_rms,
        param_specs=exchange.param_specs,
    )
    adam = directions.adam(eps, adam_eps_root)
    steps = _Steps(
        exchange,
        functools.partial(
            _of_each, muon_weight_dimension_numbers, exchange.param_specs
        ),
        {"muon": (orthogonalized, beta, None), "adam": (adam, adam_b1, adam_b2)},
        {"nesterov": nesterov, "mu_dtype": mu_dtype},
    )
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    rates = {
        "muon": optax.chain(
            add_decayed_weights(weight_decay, weight_decay_mask),
            scale_by_rate(learning_rate),
        ),
        "adam": optax.chain(
            add_decayed_weights(adam_weight_decay), scale_by_rate(adam_rate)
        ),
    }
    return chain_between(exchange, *steps.links(), by_kind(steps.kinds, rates))


def _of_each(
    numbers: Any, param_specs: Any, of_matrix: Any, of_other: Any, params: optax.Params
) -> Any:
    """A tree like the parameters with one value for matrices, another for the rest."""
    treedef: Any = jax.tree.structure(params)
    found = matrices(numbers, params, param_specs)
    return treedef.unflatten([of_other if x is None else of_matrix for x in found])


class _Steps(NamedTuple):
    """The links from gradients to a direction, in the order that an exchange wants."""

    exchange: Exchange
    of_each: Callable[..., Any]
    parts: dict[str, tuple[Any, ...]]  # of each kind: a direction, b1 and b2
    how: dict[str, Any]

    def kinds(self, params: optax.Params) -> Any:
        return self.of_each("muon", "adam", params)

    def links(self) -> list[optax.GradientTransformation]:
        if not self.exchange.averages_momentum:
            return [self._of_own_momenta()]
        if not _rounds_coarsely(self.exchange):
            return [self._of_the_mean()]
        # Rounding of a mean that is orthogonalized later would be amplified.
        mean = mask_momentum(
            self.exchange, _of_equal_size(), 0.0, UNIT_DECAY, bias_correction=False
        )
        return [self._of_own_momenta(), mean]

    def _of_the_mean(self) -> optax.GradientTransformation:
        """Directions of the mean momentum; one link, so that one mean is taken."""
        both = {name: direction for name, (direction, _, _) in self.parts.items()}
        b1s = [b1 for _, b1, _ in self.parts.values()]
        memories = functools.partial(self.of_each, *b1s)
        b2 = self.parts["adam"][2]
        direction = by_kind(self.kinds, both)
        return mask_momentum(self.exchange, direction, memories, b2, **self.how)

    def _of_own_momenta(self) -> optax.GradientTransformation:
        """Directions of each worker's own; matrices keep no second moment."""
        exchange = self.exchange
        if exchange.param_specs is not None:  # the specs of no part fit all parameters
            raise ValueError(
                "muon takes param_specs only where all workers orthogonalize the mean "
                f"momentum, got payload={exchange.payload!r}, sync_every="
                f"{exchange.sync_every} and outer={exchange.outer!r}: give payload="
                "'uniform8', 'bfloat16' or None, sync_every=1 and no outer optimizer"
            )
        # Nothing is sent here, and so nothing is a step late.
        between = dataclasses.replace(exchange, overlap=False)
        alone = self.how | {"compressor": optax.identity()}
        links = {
            name: mask_momentum(between, *part, **alone)
            for name, part in self.parts.items()
        }
        return by_kind(self.kinds, links)


def _rounds_coarsely(exchange: Exchange) -> bool:
    """Whether the codes of a mean are too coarse to orthogonalize it."""
    fine = exchange.payload in (None, "bfloat16", "uniform8")
    return not fine and exchange.axis_name is not None


def _of_equal_size() -> optax.GradientTransformation:
    r"""Divides the mean direction by the root of its second moment v, in part.

    .. math:: u \leftarrow \frac{1.1}{\sqrt{v / \bar v} + 0.1}\, u

    with the mean of v over the leaf. What many workers' directions agree on is smaller
    where they are noisy; this makes up for it. It is the second moment of FedAdam
    (Reddi et al., 2021) without its momentum and rate.
    """

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        second_moment: optax.Updates = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args

        def sized(u: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v / jnp.maximum(jnp.mean(v), _TINY))
            return u * ((1 + _LEAST) / (root + _LEAST))

        return map_present(sized, updates, second_moment), state

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
