"""The mean of the workers' momentum, in codes whose units all workers share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax import _axes
from slamb_jax._checks import (
    check_bool,
    check_dtype,
    check_floating,
    check_gradients,
    check_range,
    check_transformation,
)
from slamb_jax._ex.means import exchange_means
from slamb_jax._ex.payloads import resolve_payload
from slamb_jax._layout import mesh_axes
from slamb_jax._leaves import Leaf, keep_absent, present
from slamb_jax._left_out import see
from slamb_jax._rounding import next_step, step_seed, stochastic_round
from slamb_jax._skip import Skip
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.moments import (
    Decays,
    bias,
    check_first_moment,
    decays,
    init_moment,
    weights,
)
from slamb_jax.links.normalized import means_of_sums
from slamb_jax.links.shards import on_shards

_FLOOR = np.float32(0.05)  # of a unit, in roots of the leaf's mean second moment
_TINY = np.finfo(np.float32).tiny
_FORGOTTEN = np.float32(0.5)  # of what rounding took, where v is far above that floor


class AverageMomentumState(NamedTuple):
    """State of :func:`average_momentum`; all but ``mu`` is the same on all workers."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # the worker's own momentum, as params, float32 or mu_dtype
    nu: optax.Updates | None  # second moment of the mean, as params
    nu_mean: optax.Updates | None  # float32, [] for each leaf: the mean of nu
    direction: optax.OptState


def average_momentum(
    exchange: Exchange,
    direction: optax.GradientTransformation | None = None,
    b1: Decays = 0.9,
    b2: ArrayLike | None = None,
    *,
    share: ArrayLike | None = None,
    nesterov: bool = False,
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Takes the mean of the workers' momentum, then steps alike on all of them.

    With worker i's own gradient :math:`g_i`, at step :math:`t = 1, 2, \ldots`, and r
    the unit of each coordinate's codes Q, the same on all workers:

    .. math::

      x_i &= \beta_1 m_i + (1-\beta_1) g_i \\
      q_i &= r\,Q(x_i / r), \quad e_i = x_i - q_i \\
      M &= \text{mean over workers of } q_i \text{, in codes again} \\
      m_i &\leftarrow x_i + \frac{1-\beta_1}{\beta_1} w\, e_i \\
      v &\leftarrow \beta_2 v + (1-\beta_2) \hat M^2, \quad
      \hat M = M / (1-\beta_1^t) \\
      r &\leftarrow \sqrt{\hat v} + 0.05\,\rho, \quad
      \hat v = v / (1-\beta_2^t) \\
      u &= \text{direction}(\hat M)

    with :math:`\rho` the root of the mean of :math:`\hat v` over the leaf, and
    :math:`r = 1` at the first step. Only m differs between workers. The mean is taken
    of what is linear in the gradients, so it does not matter which worker sees which
    data: in float32, where :math:`q_i = x_i`, M is the momentum of the mean gradient,
    and the step that of dense training.

    **What rounding takes** of a worker's momentum stays there, and is sent later; no
    memory is needed for it. With v, :math:`w = 1 - \sqrt{\hat v} / 2r`: half of it is
    forgotten where a coordinate is sent often, since noise that waits makes the memory
    of the momentum longer. Nothing is forgotten where it is sent seldom. There v falls,
    and the unit with it, so that every coordinate is sent in the end. Without v
    (``average_b2=None``) all of it waits, :math:`w = 1`, and what rounding takes of a
    mean waits n times with the worker that rounds it, which sends an nth of the next:
    the sum of all M is the sum of the mean gradients, up to what the momenta hold.

    Args:
      exchange: between whom, and in what wire format (``average_payload``). None as the
        format is float32.
      direction: what is done with :math:`\hat M`: any optax transformation. One whose
        ``update`` has an argument ``second_moment`` gets :math:`\hat v` if there is a
        v. None: :math:`\hat M` itself, for links behind.
      b1: decay rate of the momentum, in [0, 1); or a tree of them, a prefix of it, or a
        function of the parameters that returns one.
      b2: decay rate of v, in [0, 1). None: the ``average_b2`` of the exchange if that
        rounds to codes; otherwise no v is kept.
      share: the share of the momentum in what is exchanged, in [0, 1), as in Lion:
        :math:`x_i = share\,m_i + (1-share)\,g_i`. None: ``b1``.
      nesterov: exchange the momentum one step ahead, as optax's optimizers do.
      bias_correction: False leaves out the powers of t.
      mu_dtype: dtype of m, None (float32) or bfloat16.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose updates are float32.

    Raises:
      ValueError: for a value out of range; in ``update``, for an unbound axis, for
        gradients of another shape or kind than the parameters, and for gradients that
        were averaged already where the types show it (``check_vma=True``).

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("data", average_payload=None)
      >>> tx = slamb_jax.average_momentum(exchange, optax.scale_by_sign(), b1=0.0)
      >>> step = lambda g: tx.update(g, tx.init(g), g)[0]
      >>> print(jax.vmap(step, axis_name="data")(jnp.array([1.0, -3.0])))
      [-1. -1.]

    References:
      Seide et al., 1-bit stochastic gradient descent, Interspeech 2014, and Stich et
      al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018: error
      feedback; Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_,
      ICML 2023: what is not sent waits in the momentum; Tang et al., `1-bit Adam
      <https://arxiv.org/abs/2102.02888>`_, 2021: the mean of momenta in units of v.
    """
    check_exchange(exchange)
    check_first_moment(b1, mu_dtype)
    check_dtype("nu_dtype", nu_dtype)
    check_bool("nesterov", nesterov)
    check_bool("bias_correction", bias_correction)
    if share is not None:
        check_range("share", share, 0.0, 1.0, open_high=True)
    if b2 is None and exchange.averages_in_codes:
        b2 = exchange.average_b2
    if b2 is not None:
        check_range("b2", b2, 0.0, 1.0, open_high=True)
    if direction is None:
        direction = optax.identity()
    check_transformation("direction", direction)
    then = optax.with_extra_args_support(direction)

    def init(params: optax.Params) -> AverageMomentumState:
        check_floating(params, "params")
        mu = init_moment(params, "mu_dtype", mu_dtype)
        nu = nu_mean = None
        if b2 is not None:
            shards = frozenset(mesh_axes(exchange.param_specs))
            nu = init_moment(params, "nu_dtype", nu_dtype)
            nu_mean = jax.tree.map(lambda p: _axes.zero_of_sum(p, shards), params)
        count = jnp.zeros([], jnp.int32)
        return AverageMomentumState(count, mu, nu, nu_mean, then.init(params))

    def update(
        updates: optax.Updates,
        state: AverageMomentumState,
        params: optax.Params | None = None,
        skip: Skip | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageMomentumState]:
        axis_name, specs = exchange.axis_name, exchange.param_specs
        _axes.check_local(updates, axis_name, mesh_axes(specs))
        check_gradients(updates, state.mu)
        if params is not None and axis_name is not None:
            see(params)
        step = next_step(state.count)
        like = updates if params is None else params
        rows, rebuild = present(
            updates, state.mu, decays(b1, state.mu), like=like, layout=exchange.layout
        )
        leaves, gs, ms, bs = ([row[i] for row in rows] for i in range(4))
        second = None
        if b2 is not None:
            second = _SecondMoment(
                _arrays(updates, state.nu, like), _arrays(updates, state.nu_mean, like)
            )

        def sent_in_units() -> tuple[list[_Part], list[_Unit], list[jax.Array]]:
            parts = [
                _Part(g, m, b, step, share, nesterov, bias_correction, exchange.overlap)
                for g, m, b in zip(gs, ms, bs, strict=True)
            ]
            units = [_Unit(jnp.float32(1), jnp.float32(1))] * len(parts)
            if second is not None and b2 is not None:
                units = second.units(step, b2)
            pairs = zip(parts, units, strict=True)
            return parts, units, [part.sent / unit.size for part, unit in pairs]

        found = _exchanged(
            sent_in_units()[2], leaves, exchange, step, exact=second is None
        )
        # What was sent is computed once more: to keep it takes a GPU another copy.
        gs, ms = _anew(gs), _anew(ms)
        if second is not None:
            second = second._replace(nus=_anew(second.nus))
        parts, units, sent = sent_in_units()
        means = [unit.size * x for unit, x in zip(units, found.means, strict=True)]
        mus = [
            part.kept(None if y is None else unit.size * unit.waits * (x - y))
            for part, unit, x, y in zip(parts, units, sent, found.sent, strict=True)
        ]
        if skip is not None:
            mus = skip.instead(ms, mus)
        new = state._replace(count=step, mu=keep_absent(rebuild(mus), state.mu))
        if b2 is not None and second is not None:
            second = second.with_means(means, leaves, step, b2, skip)
            seen = step - 1 if exchange.overlap else step
            corrected = rebuild(second.corrected(seen, b2))
            extra_args = extra_args | {"second_moment": corrected}
            new = new._replace(
                nu=keep_absent(rebuild(second.nus), state.nu),
                nu_mean=keep_absent(rebuild(second.means), state.nu_mean),
            )
        if skip is not None:
            skip.follow((state.mu, state.nu), (new.mu, new.nu))
            extra_args = extra_args | {"skip": skip}
        u, inner = then.update(rebuild(means), state.direction, params, **extra_args)
        return u, new._replace(direction=inner)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def _anew(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, from which the compiler computes again what it computed from them.

    Each behind a barrier of its own, which would join the types of several.
    """
    return [lax.optimization_barrier(x) for x in arrays]


class _Exchanged(NamedTuple):
    """The means, and what each worker sent as the others decode it."""

    means: list[jax.Array]
    sent: Sequence[jax.Array | None]  # None where nothing is rounded


def _exchanged(
    sent: list[jax.Array],
    leaves: Sequence[Leaf],
    exchange: Exchange,
    step: jax.Array,
    *,
    exact: bool,
) -> _Exchanged:
    """``exact``: what rounding took of a mean waits, too, with who rounded it."""
    payload = resolve_payload(exchange.average_payload)
    rounds = payload is not None and _axes.axis_size(exchange.axis_name) > 1
    found = exchange_means(sent, leaves, exchange, payload, step, with_errors=rounds)
    if not rounds:
        return _Exchanged(found.means, [None] * len(sent))
    taken = found.sent
    if found.server_error is not None and exact:
        taken = [x - y for x, y in zip(taken, found.server_error, strict=True)]
    return _Exchanged(found.means, taken)


class _Part:
    """One leaf's momentum: what a worker sends of it, and what it keeps.

    Kept is c m, with c the share of m in what is sent, so that errors have a place
    where c is 0; with ``overlap``, which sends what the last step left, m itself.
    """

    def __init__(
        self,
        g: jax.Array,
        m: jax.Array,
        b1: ArrayLike,
        step: jax.Array,
        share: ArrayLike | None,
        nesterov: bool,
        bias_correction: bool,
        overlap: bool,
    ) -> None:
        self._g, self._m = g.astype(jnp.float32), m.astype(jnp.float32)
        self._dtype, self._overlap = m.dtype, overlap
        self._b1, self._new = weights(b1)
        self._c = weights(b1 if share is None else share)[0]
        if nesterov and not overlap:
            self._c = self._b1 * self._b1

        def fix(t: jax.Array) -> jax.Array:
            one = jnp.float32(1)
            return jnp.maximum(bias(b1, t), 1e-7) if bias_correction else one

        if overlap:
            self._fix = fix(step - 1)
            self.sent = self._m / self._fix
        elif nesterov:
            self._fix = fix(next_step(step))
            own = self._b1 * self._new / self._fix + self._new / fix(step)
            self.sent = self._m / self._fix + own * self._g
        else:
            self._fix = fix(step)
            self.sent = (self._m + (1 - self._c) * self._g) / self._fix

    def kept(self, error: jax.Array | None) -> jax.Array:
        """The momentum to keep; ``error`` is what rounding took of what was sent."""
        weight = self._new if self._overlap else self._c * self._new
        kept = self._b1 * self._m + weight * self._g
        if error is not None:
            kept = kept + self._new * self._fix * error
        return kept.astype(self._dtype)


class _Unit(NamedTuple):
    """The unit of each coordinate's codes, the same on all workers."""

    size: jax.Array
    waits: jax.Array  # the share of what rounding took that is kept for later


class _SecondMoment(NamedTuple):
    """The second moment of the mean momentum, of one array for each leaf."""

    nus: list[jax.Array]
    means: list[jax.Array]  # [], of each of them: no pass over v must end first

    def units(self, step: jax.Array, b2: ArrayLike) -> list[_Unit]:
        """Those of each leaf; 1, and all waits, as long as nothing is known of it."""
        fix = jnp.maximum(bias(b2, step - 1), _TINY)

        def unit(nu: jax.Array, mean: jax.Array) -> _Unit:
            root = jnp.sqrt(nu.astype(jnp.float32) / fix)
            floor = _FLOOR * jnp.sqrt(mean / fix)
            size = jnp.where(floor > 0, root + floor, jnp.float32(1))
            return _Unit(size, 1 - _FORGOTTEN * (root / size))

        return [unit(nu, mean) for nu, mean in zip(self.nus, self.means, strict=True)]

    def with_means(
        self,
        means: Sequence[jax.Array],
        leaves: Sequence[Leaf],
        step: jax.Array,
        b2: ArrayLike,
        skip: Skip | None,
    ) -> "_SecondMoment":
        """After a step whose mean momentum is ``means``."""
        keep, new = weights(b2)
        squares = [jnp.square(x) for x in means]

        def moved(leaf: Leaf, square: jax.Array, nu: jax.Array) -> jax.Array:
            wide = keep * nu.astype(jnp.float32) + new * square
            if nu.dtype != jnp.bfloat16:
                return wide
            return stochastic_round(wide, step_seed(step, leaf.index))

        rows = zip(leaves, squares, self.nus, strict=True)
        nus = [moved(*row) for row in rows]
        of_leaves = zip(_means_of(squares, leaves), self.means, strict=True)
        of_leaf = [keep * old + new * x for x, old in of_leaves]
        if skip is not None:
            nus = skip.instead(self.nus, nus)
            of_leaf = skip.instead(self.means, of_leaf)
        return _SecondMoment(nus, of_leaf)

    def corrected(self, step: jax.Array, b2: ArrayLike) -> list[jax.Array]:
        """Divided by :math:`1 - b_2^t`."""
        fix = 1 / jnp.maximum(bias(b2, step), _TINY)
        return [fix * nu.astype(jnp.float32) for nu in self.nus]


def _means_of(arrays: Sequence[jax.Array], leaves: Sequence[Leaf]) -> list[jax.Array]:
    """The mean of each leaf, over all of its shards."""
    return means_of_sums([(jnp.sum(x), jnp.float32(x.size)) for x in arrays], leaves)


def _arrays(updates: Any, tree: Any, like: Any) -> list[jax.Array]:
    """Of a tree like the parameters, those that have an update."""
    return [x for _, _, x in present(updates, tree, like=like)[0]]
