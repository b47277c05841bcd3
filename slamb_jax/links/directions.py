"""What an optimizer does with the mean momentum: ``slamb_jax.directions``.

A direction is an optax transformation whose ``update`` takes the momentum as its
updates. So most optax transformations are one:

>>> import optax, slamb_jax
>>> exchange = slamb_jax.Exchange("data")
>>> signum = optax.chain(
...     slamb_jax.mask_momentum(exchange, optax.scale_by_sign()),
...     optax.scale_by_learning_rate(1e-3),
... )
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from slamb_jax._core.checks import check_bool, check_integer, check_params, check_range
from slamb_jax._core.layout import bound_axes, broadcast_specs
from slamb_jax._core.leaves import is_none, map_present, present
from slamb_jax.exchange.collectives import gather_shards, own_shard
from slamb_jax.links._matrices import (
    DimensionNumbers,
    Matrices,
    as_matrices,
    matrices,
    orthogonalize,
    rows_and_columns,
)

__all__ = ["DimensionNumbers", "adam", "muon"]

NS_COEFFS = (3.4445, -4.7750, 2.0315)
"""Of Keller Jordan's quintic, steepest at zero."""

_TREES = ("second_moment",)  # that a direction gets beside its updates


def adam(
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    eps_before_correction: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the mean momentum by the root of its second moment.

    .. math:: u = \frac{\hat M}{\sqrt{\hat v + \epsilon_{root}} + \varepsilon}

    with :math:`\hat M` and :math:`\hat v` from :func:`slamb_jax.mask_momentum`. It
    departs from Adam, whose v is the second moment of the gradient. Workers can agree
    on v of the momentum without sending anything for it.

    Args:
      eps: added to the root of the second moment, positive.
      eps_root: added under the root, not negative.
      eps_before_correction: add eps to the root of v before its bias is corrected, as
        the authors of SLAMB do in the sum form. Then
        :math:`\varepsilon / \sqrt{1-\beta_2^t}` stands for :math:`\varepsilon`.

    Returns:
      A direction without state, for :func:`slamb_jax.mask_momentum`.

    Raises:
      ValueError: for a value out of range; in ``update``, without ``second_moment``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.mask_momentum(
      ...     slamb_jax.Exchange(), slamb_jax.directions.adam(), b2=0.95
      ... )
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, -2.0, 0.0]), tx.init(params))
      >>> print(updates.round(3))
      [ 1. -1.  0.]

    References:
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014.
    """
    check_range("eps", eps, 0.0, open_low=True)
    check_range("eps_root", eps_root, 0.0)
    check_bool("eps_before_correction", eps_before_correction)

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        second_moment: optax.Updates | None = None,
        of_second_moment: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        if second_moment is None:
            raise ValueError(
                "directions.adam needs the argument second_moment, which "
                "slamb_jax.mask_momentum with a b2 passes to its direction"
            )
        least, under_root = (jnp.asarray(x, jnp.float32) for x in (eps, eps_root))
        if eps_before_correction and of_second_moment is not None:
            least = least * jnp.sqrt(of_second_moment)

        def direction(m: jax.Array, v: jax.Array) -> jax.Array:
            root = jnp.sqrt(v.astype(jnp.float32) + under_root)
            return m.astype(jnp.float32) / (root + least)

        return map_present(direction, updates, second_moment), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def muon(
    ns_coeffs: tuple[float, ...] | tuple[tuple[float, ...], ...] = NS_COEFFS,
    ns_steps: int = 5,
    eps: ArrayLike = 1e-8,
    *,
    weight_dimension_numbers: Matrices = None,
    consistent_rms: ArrayLike | None = None,
    param_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Orthogonalizes the momentum of every matrix by Newton-Schulz iteration.

    For a matrix X of r rows and c columns, the momentum, with :math:`r \le c` (else
    transposed):

    .. math::

      X &\leftarrow X / (\|X\|_F + \varepsilon) \\
      X &\leftarrow a X + (b A + c A^2) X, \quad A = X X^T, \quad \text{ns\_steps times}
      \\
      u &= \sqrt{\max(1, c_{out} / r_{in})}\; X

    All singular values of u end near one.

    Args:
      ns_coeffs: a, b and c, for each step or the same for all.
      ns_steps: how many iterations; with coefficients for each, the last ones.
      eps: added to the norm, positive.
      weight_dimension_numbers: a tree of :class:`DimensionNumbers` like the parameters,
        a prefix of it, or a function of them that returns one; None in it for a leaf
        that passes unchanged. None: leaves of two dimensions.
      consistent_rms: scale by :math:`\sqrt{\max(r_{in}, c_{out})}` times this instead.
      param_specs: how leaves are sharded over mesh axes, as in :class:`Exchange`. Each
        device gathers the rows and columns of its matrices, orthogonalizes the whole
        matrices and keeps its own shards. None: every shard counts as a matrix.

    Returns:
      A direction without state, for :func:`slamb_jax.mask_momentum`.

    Raises:
      ValueError: for a value out of range, and for dimensions that overlap.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> exchange = slamb_jax.Exchange()
      >>> tx = slamb_jax.mask_momentum(exchange, slamb_jax.directions.muon(), 0.95)
      >>> params = jnp.ones((2, 2))
      >>> updates, _ = tx.update(jnp.array([[3.0, 0.0], [0.0, 1.0]]), tx.init(params))
      >>> print(jnp.abs(updates).round())
      [[1. 0.]
       [0. 1.]]

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024; Liu et
      al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_,
      2025: ``consistent_rms``.
    """
    check_integer("ns_steps", ns_steps, 1)
    check_range("eps", eps, 0.0, open_low=True)
    if consistent_rms is not None:
        check_range("consistent_rms", consistent_rms, 0.0, open_low=True)
    coeffs = np.asarray(ns_coeffs, np.float32)
    if coeffs.ndim == 1:
        coeffs = np.broadcast_to(coeffs, (ns_steps, *coeffs.shape))
    if coeffs.shape[1:] != (3,) or len(coeffs) < ns_steps:
        raise ValueError(
            "ns_coeffs must be three numbers, or three for each of "
            f"ns_steps={ns_steps} steps, got {ns_coeffs!r}"
        )
    steps = coeffs[-ns_steps:]

    def direction(
        m: jax.Array, dimensions: DimensionNumbers | None, spec: PartitionSpec
    ) -> jax.Array:
        m = m.astype(jnp.float32)
        if dimensions is None or not m.size:
            return m
        of_matrix = sum(rows_and_columns(m.shape, dimensions), ())
        axes = [x if i in of_matrix else () for i, x in enumerate(bound_axes(spec))]
        m = gather_shards(m, axes)
        there = jax.typeof(m).sharding
        of = functools.partial(whole, dimensions=dimensions)
        if any(there.spec):  # on a mesh with Explicit axes: left to the compiler
            of = jax.sharding.auto_axes(of, out_sharding=there)
        return own_shard(of(m), axes)

    def whole(m: jax.Array, dimensions: DimensionNumbers) -> jax.Array:
        order, sizes = as_matrices(m.shape, dimensions)
        turned = m.transpose(order)
        x = jax.vmap(lambda x: orthogonalize(x, steps, eps))(turned.reshape(sizes))
        _, rows, columns = sizes
        scale: Any = max(1.0, columns / rows) ** 0.5
        if consistent_rms is not None:
            scale = max(rows, columns) ** 0.5 * consistent_rms
        x = jnp.asarray(scale, jnp.float32) * x
        return x.reshape(turned.shape).transpose(np.argsort(order))

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        rows, rebuild = present(updates, broadcast_specs(param_specs, updates))
        numbers = matrices(weight_dimension_numbers, updates, param_specs)
        return rebuild([direction(m, numbers[x.index], at) for x, m, at in rows]), state

    return optax.GradientTransformationExtraArgs(_no_state, update)


def by_kind(
    kinds: Callable[[optax.Params], Any],
    transformations: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Each transformation for the leaves of its kind; None stands for the others.

    As ``optax.partition``, which refuses gradients that are None. ``kinds`` returns a
    tree of names like the parameters.
    """
    inner = {
        name: optax.with_extra_args_support(tx) for name, tx in transformations.items()
    }

    def part(tree: Any, names: Any, name: str) -> Any:
        return jax.tree.map(
            lambda x, kind: x if kind == name else None, tree, names, is_leaf=is_none
        )

    def init(params: optax.Params) -> dict[str, optax.OptState]:
        names = kinds(params)
        return {name: tx.init(part(params, names, name)) for name, tx in inner.items()}

    def update(
        updates: optax.Updates,
        state: dict[str, optax.OptState],
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, dict[str, optax.OptState]]:
        check_params(params)
        names, new_state = kinds(params), {}
        merged = jax.tree.map(lambda _: None, updates)
        for name, tx in inner.items():
            own = {
                key: part(x, names, name) if key in _TREES else x
                for key, x in extra_args.items()
            }
            u, new_state[name] = tx.update(
                part(updates, names, name),
                state[name],
                part(params, names, name),
                **own,
            )
            merged = jax.tree.map(
                lambda a, b: b if a is None else a, merged, u, is_leaf=is_none
            )
        return merged, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _no_state(params: optax.Params) -> optax.EmptyState:
    del params
    return optax.EmptyState()
