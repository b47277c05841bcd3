"""Momentum of which a worker sends what the exchange selects, and keeps the rest."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core import axes, checks
from slamb_jax._core.joining import Joined, join_rows
from slamb_jax._core.leaves import Leaf, arrays_of, chosen, keep_absent, present, unless
from slamb_jax._core.moments import (
    Decays,
    Moments,
    bias,
    check_first_moment,
    decays,
    init_moment,
    moved,
    stored_apart,
    weights,
)
from slamb_jax._core.platform import recompute_barrier as recompute
from slamb_jax._core.rounding import next_step
from slamb_jax.compressors.codec import Sent
from slamb_jax.compressors.of_exchange import (
    Answer,
    OfExchangeState,
    Request,
    Unit,
    of_exchange,
    unit_to_join,
)
from slamb_jax.exchange.selections import AtStep, selection_at
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links._second_moment import (
    Row,
    correction_of_v,
    second_moments,
    unit_of,
)
from slamb_jax.links.compress import (
    check_keeps_nothing,
    without_residual,
)
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
    # Between averages of the parameters nothing is sent, and nothing is late.
    sends = exchange.averages_momentum or exchange.selection is not None
    if compressor is None:
        compressor = of_exchange(exchange) if sends else optax.identity()
    checks.check_transformation("compressor", compressor)
    link = _Link(
        exchange,
        optax.with_extra_args_support(then),
        optax.with_extra_args_support(compressor),
        Rule(
            exchange.averages_momentum,
            exchange.selection is not None,
            exchange.overlap and sends,
            share,
            nesterov,
            bias_correction,
        ),
        b1,
        b2,
        mu_dtype,
        nu_dtype,
    )
    tx = optax.GradientTransformationExtraArgs(link.init, link.update)
    return on_shards(tx, exchange)


class Rule(NamedTuple):
    """Which of the two kinds of exchange it is, and what of the momentum is sent."""

    agrees: bool  # workers agree at each step: the step takes M, and e waits
    selects: bool  # a selection of the momentum is sent, and the momentum is M + e
    overlaps: bool  # what is sent is what the last step left
    share: ArrayLike | None
    nesterov: bool
    bias_correction: bool
    skips: bool = False

    @property
    def keeps_what_it_sends(self) -> bool:
        """Whether the momentum in the state is a multiple of x, whose place x can take.

        Not in a step that may be skipped, which needs the old momentum once more.
        """
        others = self.nesterov or self.overlaps or self.selects or self.skips
        return self.share is None and not others

    def sent_share(self, b1: ArrayLike) -> jax.Array:
        """The share of the momentum in x."""
        if self.nesterov and not self.overlaps:
            return weights(b1)[0] * weights(b1)[0]
        return weights(b1 if self.share is None else self.share)[0]

    def scale(self, b1: ArrayLike) -> jax.Array:
        """What the momentum is multiplied by in the state.

        By its share in x, so that an e has a place where that share is 0.
        """
        as_it_is = self.selects or self.overlaps
        return jnp.float32(1) if as_it_is else self.sent_share(b1)

    def correction(self, b1: ArrayLike, step: jax.Array) -> jax.Array:
        """The bias correction of the momentum; 1 without one."""
        if not self.bias_correction:
            return jnp.float32(1)
        # At step 0, the first with overlap, it would divide 0 by 0.
        return jnp.maximum(bias(b1, step), 1e-7)


class Ahead(NamedTuple):
    """What a worker has of a leaf to send."""

    x: jax.Array
    correction: jax.Array  # of the momentum's bias, by which x is divided


def ahead(rule: Rule, row: Row, step: jax.Array) -> Ahead:
    """The momentum after this step's gradient, as far as it is sent."""
    g, m = row.g.astype(jnp.float32), row.m.astype(jnp.float32)
    if rule.selects:  # corrected after the exchange, since e stays in the momentum
        x = m if rule.overlaps else moved(m, g, row.b1)
        return Ahead(x.astype(row.m.dtype), jnp.float32(1))
    if rule.overlaps:
        correction = rule.correction(row.b1, step - 1)
        return Ahead(m / correction, correction)
    correction = rule.correction(row.b1, step)
    if rule.nesterov:
        # As optax has it: m is corrected as at the next step, g as at this one.
        b1, new = weights(row.b1)
        later = rule.correction(row.b1, next_step(step))
        of_g = b1 * new / later + new / correction
        return Ahead(m / later + of_g * g, later)
    x = m + (1 - rule.sent_share(row.b1)) * g
    return Ahead(x / correction, correction)


def take_and_keep(
    rule: Rule, row: Row, ahead: Ahead, sent: Sent | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the step takes of a leaf, and the momentum that the worker keeps.

    ``sent`` is M and e, which is None where all was sent; or one array, M + e, by which
    workers step by themselves.
    """
    g, m = row.g.astype(jnp.float32), row.m.astype(jnp.float32)
    (b1, new), scale = weights(row.b1), rule.scale(row.b1)
    # As if all of x had been sent.
    if rule.keeps_what_it_sends:
        kept = scale * (ahead.correction * ahead.x)
    else:
        kept = b1 * m + scale * new * g
    if isinstance(sent, Sent):
        # The step takes M. It took nothing of e, which so counts 1 / b1 in the
        # momentum; the recurrence adds (1 - b1) / b1 of it.
        mean, unsent = sent
        return mean, kept if unsent is None else kept + new * ahead.correction * unsent
    # The step takes M + e, and the worker keeps it.
    if rule.selects:
        kept = moved(sent, g, row.b1) if rule.overlaps else sent
        return kept, kept
    if sent is not ahead.x:  # optax.identity() leaves the momentum as it is
        kept = kept + scale * ahead.correction * (sent - ahead.x)
    return sent, kept


class _Link(NamedTuple):
    """The settings of one link, and its two functions."""

    exchange: Exchange
    direction: optax.GradientTransformationExtraArgs
    compressor: optax.GradientTransformationExtraArgs
    rule: Rule
    b1: Decays
    b2: ArrayLike | None
    mu_dtype: DTypeLike | None
    nu_dtype: DTypeLike | None

    def init(self, params: optax.Params) -> MaskMomentumState:
        checks.check_floating(params, "params")
        compressor = without_residual(self.compressor.init(params))
        check_keeps_nothing(compressor, params)
        mu = init_moment(params, "mu_dtype", self.mu_dtype)
        nu = nu_mean = None
        if self.b2 is not None:
            nu = init_moment(params, "nu_dtype", self.nu_dtype)
            if self.exchange.rounds_momentum and isinstance(
                compressor, OfExchangeState
            ):
                # Of a sum over its shards the type no longer varies over their axes.
                shards = frozenset(self.exchange.shard_axes)
                nu_mean = jax.tree.map(lambda p: axes.zero_of_sum(p, shards), params)
        count, direction = jnp.zeros([], jnp.int32), self.direction.init(params)
        return MaskMomentumState(count, mu, nu, nu_mean, compressor, direction)

    def update(
        self,
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MaskMomentumState]:
        self._check(updates, state)
        extra_args |= {} if skip is None else {"skip": skip}
        rule, step = self.rule._replace(skips=skip is not None), next_step(state.count)
        leaves = self._leaves(updates, state, params, step)
        rows = leaves.joined.rows
        # 1. x, what this worker has.
        own = [ahead(rule, row, step) for row in rows]
        if rule.selects:  # before it is sent: what is not sent stays in its place
            xs = unless(skip, [row.m for row in rows], [a.x for a in own])
            own = [a._replace(x=x) for a, x in zip(own, xs, strict=True)]
        # 2. M, the mean of what the workers send of it, and e, what this one does not.
        xs, sent, compressor = self._send(leaves, own, state, params, step, extra_args)
        own = [a._replace(x=x) for a, x in zip(own, xs, strict=True)]
        # 3. What the step takes, and what the worker keeps.
        again = [_recomputed(row) for row in rows]
        pairs = [take_and_keep(rule, *x) for x in zip(again, own, sent, strict=True)]
        taken = [x for x, _ in pairs]
        mus = [m.astype(row.m.dtype) for row, (_, m) in zip(rows, pairs, strict=True)]
        olds = sent if rule.selects else [row.m for row in rows]
        mus = unless(skip, olds, mus)
        # 4. v, of what all take; or of the worker's own gradient, since to agree on a v
        # of gradients would be to send them.
        xs = [row.g.astype(jnp.float32) for row in rows] if rule.selects else taken
        nus, nu_means = second_moments(again, xs, self.b2, step, skip)
        # 5. The direction. The moments were chosen where they were made, before it
        # reads them.
        if rule.selects:
            pairs = zip(rows, mus, strict=True)
            taken = [
                m.astype(jnp.float32) * self._fix(row.b1, step) for row, m in pairs
            ]
        taken, mus, nus = leaves.joined.split(taken, mus, nus)
        moments = self._moments(leaves, mus, nus, step)
        u, direction = self.direction.update(
            leaves.rebuild(taken), state.direction, params, **extra_args, **moments
        )
        old = state.count, state.compressor, state.direction
        count, compressor, direction = unless(skip, old, (step, compressor, direction))
        if not rule.selects:  # else the direction reads what is stored
            nus = stored_apart(nus)
        columns = mus, nus, leaves.joined.split_values(nu_means)
        mu, nu, nu_mean = map(leaves.fill, columns, (state.mu, state.nu, state.nu_mean))
        new = MaskMomentumState(count, mu, nu, nu_mean, compressor, direction)
        return u, chosen(skip, new)

    def _leaves(
        self,
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None,
        step: jax.Array,
    ) -> "_Leaves":
        """The rows of this step, those of small leaves joined."""
        # Leaves have the numbers that they have among the parameters: a gradient that
        # is None must not shift the selection, or the random bits, of those after it.
        like = state.mu if params is None else params
        found, rebuild = present(
            updates, state.mu, decays(self.b1, state.mu), state.nu, state.nu_mean,
            like=like, layout=self.exchange.layout,
        )  # fmt: skip
        at = selection_at(self.exchange, like, step)

        def unit(leaf: Leaf) -> int | None:
            # A compressor of the user's gets the leaves as they are.
            if not isinstance(state.compressor, OfExchangeState):
                return None
            return unit_to_join(self.exchange, at, leaf)

        rows = [Row(*row) for row in found]
        joined = join_rows(rows, unit, same=["b1"], values=["nu_mean"])
        return _Leaves(updates, like, [row.b1 for row in rows], joined, at, rebuild)

    def _send(
        self,
        leaves: "_Leaves",
        own: Sequence[Ahead],
        state: MaskMomentumState,
        params: optax.Params | None,
        step: jax.Array,
        extra_args: dict[str, Any],
    ) -> tuple[
        Sequence[jax.Array], Sequence[Sent] | Sequence[jax.Array], optax.OptState
    ]:
        """What the compressor makes of each x, and its state."""
        rows, xs = leaves.joined.rows, [x for x, _ in own]
        if isinstance(state.compressor, OfExchangeState):
            units = [self._unit(row, step) for row in rows]
            again = [self._unit(_recomputed(row), step) for row in rows]
            request = Request(leaves.joined.leaves, leaves.at, units, again)
            out, new = self.compressor.update(
                xs, state.compressor, **extra_args, request=request
            )
            if isinstance(out, Answer):
                return out.xs, out.sent, new
        tree = leaves.rebuild(leaves.joined.split(xs)[0])
        out, new = self.compressor.update(tree, state.compressor, params, **extra_args)
        if self.rule.agrees and isinstance(out, Sent):
            return xs, list(map(Sent, *map(leaves.join, out))), new
        wholes = leaves.join(optax.tree.add(*out) if isinstance(out, Sent) else out)
        skip = extra_args.get("skip") if self.rule.selects else None
        return xs, unless(skip, [row.m for row in rows], wholes), new

    def _unit(self, row: Row, step: jax.Array) -> Unit | None:
        return None if self.b2 is None else unit_of(row, self.b2, step)

    def _fix(self, b1: ArrayLike, step: jax.Array) -> jax.Array:
        """The factor that corrects the bias of a momentum that is M + e."""
        correction = bias(b1, step) if self.rule.bias_correction else jnp.float32(1)
        return 1 / correction

    def _moments(
        self,
        leaves: "_Leaves",
        mus: Sequence[jax.Array],
        nus: Sequence[jax.Array | None],
        step: jax.Array,
    ) -> dict[str, Any]:
        """What a direction gets beside the momentum."""
        if self.b2 is None:
            return {}
        if not self.rule.selects:
            # With overlap M is of the momenta that the last step left.
            of_nu = correction_of_v(self.b2, step - 1 if self.rule.overlaps else step)
        else:
            of_nu = self._fix(self.b2, step)
        hats = [of_nu * nu.astype(jnp.float32) for nu in nus if nu is not None]
        given = {"second_moment": leaves.rebuild(hats), "of_second_moment": of_nu}
        if self.rule.selects:
            # Factors, and not corrected moments, so that a direction may read m and v
            # where they lie: m / (1 - b1^t) would be one more array of their size.
            fixes = {id(b1): self._fix(b1, step) for b1 in leaves.b1s}
            of_mus = leaves.rebuild([fixes[id(b1)] for b1 in leaves.b1s])
            moments = leaves.rebuild(mus), leaves.rebuild(nus), of_mus, of_nu
            given["moments"] = Moments(*moments)
        return given

    def _check(self, updates: optax.Updates, state: MaskMomentumState) -> None:
        """Raises for gradients that do not fit, or that were averaged already."""
        exchange = self.exchange
        axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
        checks.check_gradients(updates, state.mu)
        rounds = exchange.rounds_momentum and isinstance(
            state.compressor, OfExchangeState
        )
        if rounds and self.b2 is not None and state.nu_mean is None:
            raise ValueError(
                f"payload={exchange.payload!r} needs units for its codes, got a state "
                "without nu_mean, as of a single worker or of payload=None: set it to "
                "jax.tree.map(jnp.mean, state.nu)"
            )


class _Leaves(NamedTuple):
    """The leaves that have a gradient."""

    updates: optax.Updates
    like: optax.Params
    b1s: list[ArrayLike]  # of each leaf
    joined: Joined
    at: AtStep | None
    rebuild: Callable[[Sequence[Any]], Any]  # a tree, of a value for each leaf

    def join(self, tree: Any) -> list[jax.Array]:
        """The array for each row, of a tree like the parameters."""
        return self.joined.join(arrays_of(self.updates, tree, self.like))

    def fill(self, new: Sequence[Any], old: Any) -> Any:
        """The new tree of a state; leaves without a gradient stay as they were."""
        return None if old is None else keep_absent(self.rebuild(new), old)


def _recomputed(row: Row) -> Row:
    g, m, nu = recompute((row.g, row.m, row.nu))
    return row._replace(g=g, m=m, nu=nu)
