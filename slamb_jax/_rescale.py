"""Element-wise adaptive rescaling: stale coordinates step with a smaller rate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes
from slamb_jax._checks import check_axis_name, check_range
from slamb_jax._layout import make_layout
from slamb_jax._leaves import Leaf, map_numbered, spread_rows
from slamb_jax._selections import Selection, Strided, check_selection


class ElementwiseRescaleState(NamedTuple):
    """State of :func:`elementwise_rescale`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def elementwise_rescale(
    selection: Selection = Strided(),  # noqa: B008 (frozen)
    b3: Any = 0.7,
    *,
    axis_name: _axes.AxisName | None = None,
    param_specs: Any = None,
    stacked: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Steps a stale coordinate with the rate of a smaller batch.

    .. math::

      u \leftarrow \left(r + \frac{1 - r}{\sqrt n}\right) u, \qquad r = \beta_3^\tau

    with n workers and :math:`\tau` the steps since the coordinate was exchanged: 1
    for a fresh coordinate, towards :math:`1/\sqrt n` as it ages. The same in both
    forms; with one worker it is the identity.

    Args:
      selection: the one that chose what was exchanged.
      b3: decay rate of the freshness, in [0, 1].
      axis_name: the mesh axis (or axes) of the workers; None for a single one.
      param_specs: how the parameters are cut, as in :func:`slamb`.
      stacked: which leaves are stacks of layers, as in :func:`slamb`.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; dtypes are kept.

    Raises:
      ValueError: for ``b3`` out of range; in ``update``, for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.elementwise_rescale(
      ...     slamb_jax.Strided(compress_ratio=0.5, min_size=0), 0.0, axis_name="i"
      ... )
      >>> def step(u):
      ...     return tx.update(u, tx.init(u))[0]
      >>> scaled = jax.vmap(step, axis_name="i")(jnp.ones((4, 2, 1)))
      >>> sorted(scaled[0].reshape(-1).tolist())  # one was sent; four workers
      [0.5, 1.0]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023:
      element-wise adaptive rescaling.
    """
    check_selection(selection)
    check_range("b3", b3, 0.0, 1.0)
    check_axis_name(axis_name)
    layout = make_layout(param_specs, stacked, axis_name)

    def init(params: optax.Params) -> ElementwiseRescaleState:
        del params
        return ElementwiseRescaleState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: ElementwiseRescaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ElementwiseRescaleState]:
        del extra_args
        step = optax.safe_increment(state.count)
        n = _axes.axis_size(axis_name)

        def rescale(leaf: Leaf, u: jax.Array) -> jax.Array:
            if n == 1 or selection.whole(leaf):
                return u
            r = freshness(selection.age(step, leaf), b3)
            factor = spread_rows(r + (1 - r) / n**0.5, leaf)
            return (factor * u.astype(jnp.float32)).astype(u.dtype)

        u = map_numbered(rescale, updates, like=params, layout=layout)
        return u, ElementwiseRescaleState(step)

    return optax.GradientTransformationExtraArgs(init, update)


def freshness(age: jax.Array, b3: Any) -> jax.Array:
    r""":math:`\beta_3^\tau`, float32, one per row; exactly 1 on the mask."""
    power = jnp.exp(age.astype(jnp.float32) * jnp.log(jnp.asarray(b3, jnp.float32)))
    # A power once per row, not once per element of all that uses it.
    return jax.lax.optimization_barrier(jnp.where(age == 0, jnp.float32(1), power))
