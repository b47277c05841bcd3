"""Momentum of which a worker sends what the exchange selects, and keeps the rest."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core import axes, checks
from slamb_jax._core.leaves import arrays_of, chosen, keep_absent, present, unless
from slamb_jax._core.moments import (
    Decays,
    bias,
    check_first_moment,
    decays,
    init_moment,
)
from slamb_jax._core.rounding import next_step
from slamb_jax.exchange.blocks import AtStep, selection_at
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links import _compressor, _mean_momentum, _selected_momentum
from slamb_jax.links._mean_momentum import Row, Rule, SecondMoment
from slamb_jax.links._selected_momentum import Moments
from slamb_jax.links.on_shards import on_shards
from slamb_jax.links.randk_compress import replace_selected

UNIT_DECAY = 0.98
"""Decay rate of v where it is the unit of the codes and nothing else."""


class MaskMomentumState(NamedTuple):
    """State of :func:`mask_momentum`.

    Where workers agree all but ``mu`` is the same on all of them. ``mu`` is b1 m there,
    so that what waits has a place where b1 is 0, and m with a selection.
    """

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # the worker's own momentum, as params, float32 or mu_dtype
    nu: optax.Updates | None  # second moment, as params
    nu_mean: optax.Updates | None  # float32, [] for each leaf: the mean of nu, in codes
    compressor: optax.OptState
    direction: optax.OptState


def mask_momentum(
    exchange: Exchange,
    direction: optax.GradientTransformation | None = None,
    b1: Decays = 0.9,
    b2: ArrayLike | None = UNIT_DECAY,
    *,
    compressor: optax.GradientTransformation | None = None,
    share: ArrayLike | None = None,
    nesterov: bool = False,
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a worker's momentum, and sends of it what the exchange selects.

    With worker i's own gradient :math:`g_i` at step :math:`t = 1, 2, \ldots`, the
    selected coordinates :math:`M_t` (all, without a selection) and the wire format Q:

    .. math::

      x_i &= \beta_1 m_i + (1-\beta_1) g_i \\
      q_i &= Q(x_i[M_t]), \quad e_i = x_i - q_i, \quad
      M = \text{mean over workers of } q_i \text{, in the wire format again}

    What a worker does not send waits in its momentum. No memory is needed for it, and
    nothing of a gradient is lost. Two kinds of exchange differ in one rule:

    .. list-table::
       :header-rows: 1

       * - kind of exchange
         - the step takes
         - :math:`m_i \leftarrow`
         - v is of
       * - the default: workers agree on M at every step
         - M
         - :math:`q_i + e_i / \beta_1`
         - :math:`\hat M`
       * - with a ``selection``: workers step by themselves
         - :math:`M + e_i`
         - :math:`M + e_i`
         - :math:`g_i`

    In the first kind only m differs between workers. The mean is taken of what is
    linear in the gradients, so it does not matter which worker sees which data: in
    float32, where :math:`q_i = x_i`, the step is that of dense training. The second is
    the paper's momentum masking with local error compensation (SLAMB, algorithm 1). The
    step that follows is direction(:math:`\hat M`), with :math:`\hat M = M /
    (1-\beta_1^t)` and :math:`\hat v = v / (1-\beta_2^t)`.

    **Units of codes.** Where workers agree in codes, they are of :math:`x / r`, with
    :math:`r = \sqrt{\hat v} + 0.05 \rho`, where :math:`\rho` is the root of the mean of
    :math:`\hat v` over the leaf; r is 1 at the first step. Of what rounding takes the
    share :math:`1 - w = \sqrt{\hat v} / 2 r` is forgotten, at most half, where a
    coordinate is sent often: noise that waits makes the memory of the momentum longer.
    Nothing is forgotten where it is sent seldom. There v falls, and the unit with it,
    so that every coordinate is sent in the end. Without v (``b2=None``) r and w are 1,
    and what rounding takes of a mean waits n times with the worker that rounds it.

    With ``overlap`` in the exchange, what is sent is what the last step left. Where
    workers step by themselves without a selection (``outer``, or ``sync_every`` above
    1) nothing is sent here. Where a worker is a group of devices, put
    :func:`average_gradients` in front.

    Use it by itself in front of any direction, such as ``optax.scale_by_sign()``.

    Args:
      exchange: between whom, which coordinates when, and in what wire format.
      direction: what is done with :math:`\hat M`: any optax transformation. One whose
        ``update`` has an argument ``second_moment`` gets :math:`\hat v`. None:
        :math:`\hat M` itself, for links that follow.
      b1: decay rate of the momentum, in [0, 1); or a tree of them, a prefix of it, or a
        function of the parameters that returns one.
      b2: decay rate of v, in [0, 1). None: no v is kept.
      compressor: what exchanges x in place of
        :func:`randk_compress_with_error_feedback`, which may be given, too. Any optax
        transformation: it gets x and returns ``Sent(mean, unsent)``, or one tree,
        :math:`M + e`, by which workers step by themselves, as ``optax.identity()``. It
        must not keep a residual: the momentum does.
      share: the share of the momentum in x, in [0, 1), as in Lion:
        :math:`x_i = share\,m_i + (1-share)\,g_i`. None: ``b1``.
      nesterov: exchange the momentum one step ahead, as optax's optimizers do.
      bias_correction: False leaves out the powers of t.
      mu_dtype: dtype of m, None (float32) or bfloat16; with a selection, and no
        ``payload``, also its wire format.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose updates are float32.

    Raises:
      ValueError: for a value out of range, for a compressor with a residual, and for
        ``share`` or ``nesterov`` with a selection; in ``update``, for an unbound axis,
        for gradients of another shape or kind than the parameters, and for gradients
        that were averaged already where the types show it (``check_vma=True``).

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("data", payload=None)
      >>> tx = slamb_jax.mask_momentum(exchange, optax.scale_by_sign(), b1=0.0)
      >>> step = lambda g: tx.update(g, tx.init(g), g)[0]
      >>> print(jax.vmap(step, axis_name="data")(jnp.array([1.0, -3.0])))
      [-1. -1.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023:
      momentum masking; Seide et al., 1-bit stochastic gradient descent, Interspeech
      2014: error feedback; Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_,
      2021: the mean of momenta in units of v.
    """
    check_exchange(exchange)
    check_first_moment(b1, mu_dtype)
    checks.check_dtype("nu_dtype", nu_dtype)
    checks.check_bool("nesterov", nesterov)
    checks.check_bool("bias_correction", bias_correction)
    if share is not None:
        checks.check_range("share", share, 0.0, 1.0, open_high=True)
    if b2 is not None:
        checks.check_range("b2", b2, 0.0, 1.0, open_high=True)
    if exchange.selection is not None and (share is not None or nesterov):
        raise ValueError(
            f"share={share!r} and nesterov={nesterov!r} need an exchange without a "
            f"selection, got {exchange!r}: what is selected is of the momentum itself"
        )
    then = optax.identity() if direction is None else direction
    checks.check_transformation("direction", then)
    then = optax.with_extra_args_support(then)
    theirs = _compressor.as_compressor(compressor, exchange)
    has_units = b2 is not None and theirs is None and exchange.rounds_momentum
    overlap = exchange.overlap and exchange.averages_momentum
    rule = Rule(share, nesterov, bias_correction, overlap)

    def init(params: optax.Params) -> MaskMomentumState:
        checks.check_floating(params, "params")
        mu = init_moment(params, "mu_dtype", mu_dtype)
        nu = nu_mean = None
        if b2 is not None:
            nu = init_moment(params, "nu_dtype", nu_dtype)
        if has_units:
            shards = frozenset(exchange.shard_axes)
            nu_mean = jax.tree.map(lambda p: axes.zero_of_sum(p, shards), params)
        compressed: optax.OptState = optax.EmptyState()
        if theirs is not None:
            compressed = theirs.init(params)
            _compressor.check_keeps_nothing(compressed, params)
        count = jnp.zeros([], jnp.int32)
        return MaskMomentumState(count, mu, nu, nu_mean, compressed, then.init(params))

    def update(
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MaskMomentumState]:
        _check_update(exchange, updates, state, has_units=has_units)
        if skip is not None:
            extra_args = extra_args | {"skip": skip}
        step = next_step(state.count)
        like = state.mu if params is None else params
        columns, rebuild = present(
            updates, state.mu, decays(b1, state.mu), like=like, layout=exchange.layout
        )
        rows = [Row(*column) for column in columns]
        second = None
        if b2 is not None:
            nus, nu_means = (
                None if tree is None else arrays_of(updates, tree, like)
                for tree in (state.nu, state.nu_mean)
            )
            second = SecondMoment(nus or [], nu_means, b2)

        compress = None
        if theirs is not None:
            compress = functools.partial(
                _compressor.compress, theirs, rebuild, updates, like,
                state.compressor, params, extra_args,
            )  # fmt: skip
        if exchange.selection is None:
            new = _agree(exchange, rule, rows, second, step, skip, compress)
        else:
            at = selection_at(exchange, like, step)
            new = _step_alone(exchange, rule, rows, second, at, skip, compress)
        nu, nu_mean, handed = state.nu, state.nu_mean, {}
        if (after := new.second) is not None:
            nu = keep_absent(rebuild(after.nus), nu)
            if after.means is not None:
                nu_mean = keep_absent(rebuild(after.means), nu_mean)
            nu_hats = [new.of_nu * x.astype(jnp.float32) for x in after.nus]
            handed["second_moment"] = rebuild(nu_hats)
            handed["of_second_moment"] = new.of_nu
            if new.of_mus is not None:
                handed["moments"] = Moments(
                    rebuild(new.mus), rebuild(after.nus), rebuild(new.of_mus), new.of_nu
                )
        u, inner = then.update(
            rebuild(new.means), state.direction, params, **extra_args, **handed
        )
        old = state.count, state.compressor, state.direction
        count, *rest = unless(skip, old, (step, new.compressor, inner))
        mu = keep_absent(rebuild(new.mus), state.mu)
        return u, chosen(skip, MaskMomentumState(count, mu, nu, nu_mean, *rest))

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


class _Exchanged(NamedTuple):
    """What one step makes of the momenta; lists have one array for each leaf."""

    means: list[jax.Array]  # what the step takes, bias-corrected, float32
    mus: list[jax.Array]  # what the worker keeps
    of_mus: list[jax.Array] | None  # means over mus, where that is what the step takes
    second: SecondMoment | None
    of_nu: jax.Array  # the factor that corrects the bias of v
    compressor: optax.OptState


def _agree(
    exchange: Exchange,
    rule: Rule,
    rows: list[Row],
    second: SecondMoment | None,
    step: jax.Array,
    skip: jax.Array | None,
    compress: _compressor.Compress | None,
) -> _Exchanged:
    """The step takes M, and e waits."""
    compressed: optax.OptState = optax.EmptyState()
    if compress is None:
        means, mus = _mean_momentum.exchanged(
            exchange, rule, rows, second, step, skips=skip is not None
        )
    else:
        means, mus, compressed = _compressor.exchanged_by(
            compress, rule, rows, step, agree=exchange.averages_momentum
        )
    mus = unless(skip, [row.m for row in rows], mus)
    of_nu = jnp.float32(1)
    if second is not None:
        second = second.after(means, [row.leaf for row in rows], step, skip)
        # With overlap M is of the momenta that the last step left.
        of_nu = second.correction(step - 1 if rule.overlap else step)
    return _Exchanged(means, mus, None, second, of_nu, compressed)


def _step_alone(
    exchange: Exchange,
    rule: Rule,
    rows: list[Row],
    second: SecondMoment | None,
    at: AtStep,
    skip: jax.Array | None,
    compress: _compressor.Compress | None,
) -> _Exchanged:
    """The step takes M + e, which the worker keeps; v is of its own gradient."""
    leaves = [row.leaf for row in rows]
    compressed: optax.OptState = optax.EmptyState()

    def send(ms: list[jax.Array]) -> list[jax.Array]:
        nonlocal compressed
        if compress is None:
            return replace_selected(exchange, at, ms, leaves, skip)
        out = compress(ms)
        compressed = out.state
        pairs = zip(out.in_place, ms, strict=True)
        return unless(skip, ms, [x.astype(m.dtype) for x, m in pairs])

    mus = _selected_momentum.selected(exchange, rows, send, skip)
    if second is not None:
        second = _selected_momentum.second_moment(second, rows, at.step, skip)
    one = jnp.float32(1)
    of_mus, of_nu = [one] * len(rows), one
    if rule.bias_correction:
        of_mus = [1 / bias(row.b1, at.step) for row in rows]
        of_nu = one if second is None else 1 / bias(second.b2, at.step)
    pairs = zip(of_mus, mus, strict=True)
    means = [of_mu * mu.astype(jnp.float32) for of_mu, mu in pairs]
    return _Exchanged(means, mus, of_mus, second, of_nu, compressed)


def _check_update(
    exchange: Exchange,
    updates: optax.Updates,
    state: MaskMomentumState,
    *,
    has_units: bool,
) -> None:
    """Raises for gradients that do not fit the momentum or were averaged already."""
    axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
    checks.check_gradients(updates, state.mu)
    if has_units and state.nu_mean is None:
        raise ValueError(
            f"payload={exchange.payload!r} needs units for its codes, got a state "
            "without nu_mean, as of a single worker or of payload=None: set it to "
            "jax.tree.map(jnp.mean, state.nu)"
        )
