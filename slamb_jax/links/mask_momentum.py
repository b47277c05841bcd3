"""Momentum of which a worker sends what the exchange selects, and keeps the rest."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core import axes, checks
from slamb_jax._core.hyperparameters import static
from slamb_jax._core.leaves import arrays_of, chosen, present, unless
from slamb_jax._core.moments import (
    Decays,
    check_first_moment,
    decays,
    init_moment,
)
from slamb_jax._core.rounding import next_step
from slamb_jax.exchange.blocks import selection_at
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links import _compressor, _mean_momentum
from slamb_jax.links._mean_momentum import (
    Exchanged,
    Row,
    Rule,
    SecondMoment,
    join,
    packs_of,
)
from slamb_jax.links._packed import alone
from slamb_jax.links._selected_momentum import step_alone
from slamb_jax.links.on_shards import on_shards

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
    nu_mean: optax.Updates | None  # float32, [] for each leaf: mean of nu, if quantized
    compressor: optax.OptState
    direction: optax.OptState

    @staticmethod
    def after_the_mean() -> tuple[str, ...]:
        """The fields that are equal on all workers, random keys among them."""
        return ("direction",)


@static("nesterov", "bias_correction", "mu_dtype", "nu_dtype", trees=("b1",))
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

      x_i &= \beta_1 m_i + (1-\beta_1) g_i, \quad
      q_i = Q(x_i[M_t]), \quad e_i = x_i - q_i \\
      M &= \text{mean over workers of } q_i \text{, in the wire format again}

    What a worker does not send waits in its momentum: it takes no memory, and nothing
    of a gradient is lost. Two kinds of exchange differ in one rule:

    ===========================================  ==========  ===========  =======
    kind of exchange                             step takes  m becomes    v is of
    ===========================================  ==========  ===========  =======
    the default: workers agree at each step      M           q + e / b1   M
    a ``selection``: workers step by themselves  M + e       M + e        g
    ===========================================  ==========  ===========  =======

    In the first kind only m differs between workers. The mean is of what is linear in
    the gradients, so it does not matter which worker sees which data: in float32 the
    step is that of dense training. The second is SLAMB's momentum masking with local
    error compensation. The updates are direction(:math:`\hat M`), with
    :math:`\hat M = M / (1-\beta_1^t)` and :math:`\hat v = v / (1-\beta_2^t)`.

    **Units.** Where the momentum is quantized, these are of :math:`x / r`, with
    :math:`r = \sqrt{\hat v} + 0.05 \rho`, where :math:`\rho` is the root of the mean of
    :math:`\hat v` over the leaf; r is 1 at the first step. Of what rounding takes the
    share :math:`\sqrt{\hat v} / 2 r` is forgotten: half of it where a coordinate is
    sent often, since noise that waits makes the memory of the momentum longer, and
    nothing where it is sent seldom. There v falls, and the unit with it, so that every
    coordinate is sent in the end. Without v (``b2=None``) r is 1, all of it waits, and
    what rounding takes of M waits n times with the worker that rounds it.

    Use it by itself in front of any direction. With ``overlap`` in the exchange, what
    is sent is what the last step left. Where workers step by themselves without a
    selection (``outer``, ``sync_every`` above 1) nothing is sent here. Where a worker
    is a group of devices, put :func:`average_gradients` in front.

    Args:
      exchange: between whom, which coordinates when, and in what wire format.
      direction: what is done with :math:`\hat M`: any optax transformation. One whose
        ``update`` has an argument ``second_moment`` gets :math:`\hat v`. None:
        :math:`\hat M` itself, for links that follow.
      b1: decay rate of the momentum, in [0, 1); or a tree of them, a prefix of it, or a
        function of the parameters that returns one. A function of a number is a
        schedule to ``optax.inject_hyperparams``.
      b2: decay rate of v, in [0, 1). None: no v is kept.
      compressor: what exchanges x in place of
        :func:`randk_compress_with_error_feedback`, which may be given, too: any optax
        transformation that gets x and returns ``Sent(mean, unsent)``, or one tree,
        M + e, by which workers step by themselves, as ``optax.identity()`` does. It
        must not keep a residual, since the momentum does.
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
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023,
      section 3: momentum masking; Seide et al., 1-bit stochastic gradient descent,
      Interspeech 2014: error feedback; Tang et al., `1-bit Adam
      <https://arxiv.org/abs/2102.02888>`_, 2021: the mean of momenta in units of v.
    """
    check_exchange(exchange)
    check_first_moment(b1, mu_dtype)
    checks.check_dtype("nu_dtype", nu_dtype)
    checks.check_bool("nesterov", nesterov)
    checks.check_bool("bias_correction", bias_correction)
    if share is not None:
        checks.check_decay_rate("share", share)
    if b2 is not None:
        checks.check_decay_rate("b2", b2)
    if exchange.selection is not None and (share is not None or nesterov):
        raise ValueError(
            f"share={share!r} and nesterov={nesterov!r} need an exchange without a "
            f"selection, got {exchange!r}: what is selected is of the momentum itself"
        )
    then = optax.identity() if direction is None else direction
    checks.check_transformation("direction", then)
    theirs = _compressor.as_compressor(compressor, exchange)
    # Where only parameters are averaged, the momentum is a worker's own and never late.
    overlap = exchange.overlap and exchange.averages_momentum
    link = _Link(
        exchange,
        optax.with_extra_args_support(then),
        theirs,
        Rule(share, nesterov, bias_correction, overlap),
        b1,
        b2,
        mu_dtype,
        nu_dtype,
        agree=exchange.averages_momentum,
        in_codes=exchange.rounds_momentum,
        has_units=b2 is not None and theirs is None and exchange.rounds_momentum,
    )
    tx = optax.GradientTransformationExtraArgs(link.init, link.update)
    return on_shards(tx, exchange)


class _Link(NamedTuple):
    """The settings of one link, and its two functions."""

    exchange: Exchange
    direction: optax.GradientTransformationExtraArgs
    compressor: optax.GradientTransformationExtraArgs | None  # None: ours
    rule: Rule
    b1: Decays
    b2: ArrayLike | None
    mu_dtype: DTypeLike | None
    nu_dtype: DTypeLike | None
    agree: bool  # workers agree on M at each step
    in_codes: bool  # and M is rounded
    has_units: bool  # to codes of x / r

    def init(self, params: optax.Params) -> MaskMomentumState:
        checks.check_floating(params, "params")
        mu = init_moment(params, "mu_dtype", self.mu_dtype)
        nu = nu_mean = None
        if self.b2 is not None:
            nu = init_moment(params, "nu_dtype", self.nu_dtype)
        if self.has_units:
            # Of a sum over its shards the type no longer varies over their axes.
            shards = frozenset(self.exchange.shard_axes)
            nu_mean = jax.tree.map(lambda p: axes.zero_of_sum(p, shards), params)
        compressed: optax.OptState = optax.EmptyState()
        if self.compressor is not None:
            compressed = self.compressor.init(params)
            _compressor.check_keeps_nothing(compressed, params)
        inner = self.direction.init(params)
        count = jnp.zeros([], jnp.int32)
        return MaskMomentumState(count, mu, nu, nu_mean, compressed, inner)

    def update(
        self,
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MaskMomentumState]:
        self._check(updates, state)
        if skip is not None:  # a direction may be a link, too
            extra_args = extra_args | {"skip": skip}
        step = next_step(state.count)
        # Leaves have the numbers that they have among the parameters: a gradient that
        # is None must not shift the selection, or the random bits, of those after it.
        like = state.mu if params is None else params
        columns, rebuild = present(
            updates, state.mu, decays(self.b1, state.mu),
            like=like, layout=self.exchange.layout,
        )  # fmt: skip
        rows = [Row(*column) for column in columns]
        second = None
        if self.b2 is not None:
            nus, nu_means = (
                None if tree is None else arrays_of(updates, tree, like)
                for tree in (state.nu, state.nu_mean)
            )
            second = SecondMoment(nus or [], nu_means, self.b2)
        compress = None
        if self.compressor is not None:
            compress = functools.partial(
                _compressor.compress, self.compressor, rebuild, updates, like,
                state.compressor, params, extra_args,
            )  # fmt: skip
        if self.exchange.selection is None:
            new = self._agree(rows, second, step, skip, compress)
        else:
            at = selection_at(self.exchange, like, step)
            new = step_alone(self.exchange, self.rule, rows, second, at, skip, compress)
        u, inner = self.direction.update(
            rebuild(new.means), state.direction, params,
            **extra_args, **new.for_direction(rebuild),
        )  # fmt: skip
        # The moments were chosen where they were made, before the direction read them.
        old = state.count, state.compressor, state.direction
        count, *rest = unless(skip, old, (step, new.compressor, inner))
        moments = new.moments(rebuild, state)
        return u, chosen(skip, MaskMomentumState(count, *moments, *rest))

    def _agree(
        self,
        rows: list[Row],
        second: SecondMoment | None,
        step: jax.Array,
        skip: jax.Array | None,
        compress: _compressor.Compress | None,
    ) -> Exchanged:
        """The step takes M, and e waits."""
        compressed: optax.OptState = optax.EmptyState()
        # A compressor of the user's gets the leaves as they are.
        packs = (
            alone([row.leaf for row in rows])
            if compress
            else packs_of(rows, second, self.exchange)
        )
        rows, second = join(packs, rows, second)
        if compress is None:
            means, mus, second = _mean_momentum.exchanged(
                self.exchange,
                self.rule,
                rows,
                second,
                step,
                in_codes=self.in_codes,
            )
        else:
            means, mus, compressed = _compressor.exchanged_by(
                compress, self.rule, rows, step, agree=self.agree
            )
        mus = unless(skip, [row.m for row in rows], mus)
        of_nu = jnp.float32(1)
        if second is not None:
            second = second.after(means, [row.leaf for row in rows], step, skip)
            # With overlap M is of the momenta that the last step left.
            of_nu = second.correction(step - 1 if self.rule.overlap else step)
        new = Exchanged(means, mus, None, second, of_nu, compressed)
        return new.split(packs)

    def _check(self, updates: optax.Updates, state: MaskMomentumState) -> None:
        """Raises for gradients that do not fit, or that were averaged already."""
        exchange = self.exchange
        axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
        checks.check_gradients(updates, state.mu)
        if self.has_units and state.nu_mean is None:
            raise ValueError(
                f"payload={exchange.payload!r} needs units for its codes, got a state "
                "without nu_mean, as of a single worker or of payload=None: set it to "
                "jax.tree.map(jnp.mean, state.nu)"
            )
