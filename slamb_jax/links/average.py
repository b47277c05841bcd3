"""Averaging the parameters of replicas that drift apart."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes
from slamb_jax._checks import check_params
from slamb_jax._ex.checks import check_parameters_payload
from slamb_jax._layout import mesh_axes
from slamb_jax._left_out import see
from slamb_jax._rounding import next_step
from slamb_jax._skip import Skip
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.averaged import Kept, averaged
from slamb_jax.links.shards import on_shards


class AverageParametersState(NamedTuple):
    """State of :func:`average_parameters_every`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    anchor: optax.Params | None = None  # float32, as params; see there
    outer: optax.OptState | None = None  # the outer optimizer's
    average_nu: optax.Params | None = None  # float32, as params: v of the means
    average_nu_mean: optax.Params | None = None  # float32, [] for each leaf: of v


def average_parameters_every(
    exchange: Exchange,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters over the workers every H steps, after the update.

    The last link of a chain, after any optimizer. Workers that step by themselves
    should draw from the same data: the mean of their steps is not the step along the
    mean gradient. :func:`average_momentum` takes the mean first. With the step
    :math:`t = 1, 2, \ldots`:

    .. math::

      u \leftarrow \begin{cases}
        \text{mean over workers of } (p + u) - p & t \bmod H = 1 \bmod H \\
        u & \text{otherwise}
      \end{cases}

    so at steps 1, H + 1, 2H + 1, ... (H = 1: at every step; in the authors' code that
    never fires). The exchange stands in a conditional: at other steps nothing is sent.
    An optax transformation returns updates, not parameters, so the replicas then agree
    to rounding; where they must be bit-identical, overwrite them with
    :func:`average_parameters`. Moments are not averaged. The step count must be the
    same on all workers.

    **Rolling**, the default for H above 1: each step averages the coordinates
    :math:`R_t`, a share 1/H of them and all of the small leaves; each coordinate has
    its turn once in H steps. As many bytes at every step, and no conditional.

    **In codes.** With an ``average_payload`` the difference to the anchor a, the last
    average, is exchanged:

    .. math::

      d = p + u - a, \quad a \leftarrow a + \text{mean over workers of } Q(d),
      \quad p + u \leftarrow a

    What rounding takes is lost. The noise of gradients makes up for that on average:
    what a worker rounds to nothing now, it or another sends soon. A coordinate whose
    steps are always small beside others of its leaf would not move, though. A payload
    with ``error_feedback`` excludes that: a worker keeps what rounding took of its own
    difference in its parameters,

    .. math:: p + u \leftarrow a + (d - Q(d)),

    and sends it the next time. At H = 1 without feedback and overlap the replicas are
    equal, to the bit, and a is the parameters; else all workers keep it (one more
    copy of the parameters). All workers must begin with the same parameters, as with
    :func:`replicate`.

    **Normalized.** The mean in codes, :math:`\Delta`, is divided by the root of its
    second moment v, relative to the mean :math:`\bar v` of v over the leaf (over its
    coordinates of this step):

    .. math::

      v \leftarrow \beta v + (1 - \beta) \Delta^2, \quad
      a \leftarrow a + \frac{1.1}{\sqrt{v / \bar v} + 0.1} \, \Delta

    with :math:`\beta` the ``average_b2`` of the exchange. v is one more copy of the
    parameters; where all are averaged at once, :math:`\bar v` is kept with it. What
    many workers' directions agree on is smaller where they are noisy: this makes up
    for it, as Adam's own v does in dense training. It is the second moment of FedAdam,
    without its momentum and rate.

    **Overlap.** With ``overlap`` in the exchange the parameters are averaged as the
    last step left them, and this step's update is added behind: :math:`p` stands for
    :math:`p + u` above, and :math:`p + u \leftarrow \ldots + u`. Then the exchange does
    not wait for this step's gradient, and can run behind the forward and backward pass.

    **Outer optimizer.** With ``outer`` the difference is the gradient of an optimizer
    that all workers run alike, at steps H, 2H, ...:

    .. math::

      a \leftarrow a + \text{outer}(-\text{mean over workers of } Q(d)),
      \quad p + u \leftarrow a + (d - Q(d))

    Behind local AdamW (``average_payload=None``) that is DiLoCo with
    ``outer=optax.sgd(0.7, momentum=0.9, nesterov=True)``, behind Muon MuLoCo, with a
    single worker SNOO, and with ``outer=None, rolling=False`` local SGD.

    Args:
      exchange: between whom, how often (``sync_every``; None: never), whether all at
        once (``rolling``), in what wire format (``average_payload``), and by which
        ``outer`` optimizer.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: for an ``average_payload`` of the largest coordinates without
        ``error_feedback``; in ``update``, without ``params`` or for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("data", average_payload=None)
      >>> tx = optax.chain(
      ...     optax.sgd(1e-3), slamb_jax.average_parameters_every(exchange)
      ... )
      >>> def step(p):
      ...     u, _ = tx.update(jnp.zeros_like(p), tx.init(p), p)
      ...     return p + u
      >>> print(jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0])).round(3))
      [2. 2.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023;
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023;
      Liu et al., `Distributed Lion <https://arxiv.org/abs/2404.00438>`_, 2024: signs
      of local steps, averaged and without feedback;
      Reddi et al., `Adaptive Federated Optimization
      <https://arxiv.org/abs/2003.00295>`_, ICLR 2021 (FedAdam);
      Thérien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025; Kallusky et
      al., `SNOO <https://arxiv.org/abs/2510.15830>`_, 2025.
    """
    check_exchange(exchange)
    check_parameters_payload(exchange)
    sync_every, outer = exchange.sync_every, exchange.outer

    def init(params: optax.Params) -> AverageParametersState:
        anchor = outer_state = nu = nu_mean = None
        if exchange.keeps_anchor:
            anchor = jax.tree.map(_copy_f32, params)
        if outer is not None:
            outer_state = outer.init(anchor)
        if exchange.normalizes:
            nu = optax.tree.zeros_like(params, dtype=jnp.float32)
        if exchange.normalizes and not exchange.in_turn:
            shards = frozenset(mesh_axes(exchange.param_specs))
            nu_mean = jax.tree.map(lambda p: _axes.zero_of_sum(p, shards), params)
        count = jnp.zeros([], jnp.int32)
        return AverageParametersState(count, anchor, outer_state, nu, nu_mean)

    def update(
        updates: optax.Updates,
        state: AverageParametersState,
        params: optax.Params | None = None,
        skip: Skip | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageParametersState]:
        del extra_args
        check_params(params)
        step, kept = next_step(state.count), Kept(*state[1:])
        n = _axes.axis_size(exchange.axis_name)
        if exchange.axis_name is None:
            _axes.check_local(updates, None, mesh_axes(exchange.param_specs))
        if sync_every is not None:
            see(params)
        if sync_every is None or (n == 1 and outer is None):
            return updates, AverageParametersState(step, *kept)

        def average(updates: optax.Updates, params: optax.Params, kept: Any) -> Any:
            return averaged(updates, params, kept, exchange, step, skip)

        def keep(updates: optax.Updates, params: optax.Params, kept: Any) -> Any:
            del params
            return updates, kept

        due = exchange.averages_at(step)
        if due is True:  # at every step
            updates, kept = average(updates, params, kept)
        else:
            updates, kept = _axes.cond(due, average, keep, updates, params, kept)
        return updates, AverageParametersState(step, *kept)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def _copy_f32(p: Any) -> jax.Array:
    """A copy, since buffers may be donated; zeros for a ``ShapeDtypeStruct``."""
    if isinstance(p, jax.ShapeDtypeStruct):
        return jnp.zeros(p.shape, jnp.float32)
    return jnp.array(p, jnp.float32, copy=True)
