"""Momentum of which a worker sends what the exchange selects, and keeps the rest.

With x what a worker has, q what it sends of x, e = x - q and M the mean of all q:

    agree:  the step takes M,      the worker keeps q + e / b1
    alone:  the step takes M + e,  and so does the worker

A step is four functions of a :class:`Row`, a leaf: :func:`ahead` makes x, the
compressor sends it, :func:`take_and_keep` is the rule above, and
:func:`second_moments` are for the direction.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core import axes, checks
from slamb_jax._core.joining import Joined, join_rows, spread_over, sum_parts
from slamb_jax._core.leaves import (
    Leaf,
    broadcast_prefix,
    chosen,
    keep_absent,
    next_step,
    present,
    unless,
)
from slamb_jax._core.recompute import computed_apart, recompute
from slamb_jax.compressors.codec import Sent, in_shape
from slamb_jax.compressors.of_exchange import (
    Answer,
    OfExchangeState,
    Request,
    Unit,
    of_exchange,
    unit_to_join,
)
from slamb_jax.exchange.collectives import pany, psum_each
from slamb_jax.exchange.selections import AtStep, selection_at
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.compress import check_keeps_nothing, without_residual
from slamb_jax.links.on_shards import on_shards

#: Decay rate of v where it is the unit of the codes and nothing else.
UNIT_DECAY = 0.98

_FLOOR = np.float32(0.05)  # of a unit, in roots of the leaf's mean second moment
_LEAST = np.float32(0.1)  # of a b1 that may change, so that 1 / b1 of e is no blow-up
_TINY, _NAN = np.finfo(np.float32).tiny, np.float32(np.nan)
_FORGOTTEN = np.float32(0.5)  # of a quantization error, where v is far above that floor


#: A decay rate for all leaves, or a tree of them: a prefix of the parameters'.
Decays: TypeAlias = ArrayLike | chex.ArrayTree


class MaskMomentumState(NamedTuple):
    """State of :func:`mask_momentum`.

    Where workers agree all but ``mu`` is the same on all of them. ``mu`` is b1 m there,
    so that what waits has a place where b1 is 0; and m with a selection, and where b1
    is an array, as of a schedule, which the next step may have another of.
    """

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # the worker's own momentum, as params, float32 or mu_dtype
    nu: optax.Updates | None  # second moment, as params
    nu_mean: optax.Updates | None  # float32, [] for each leaf: mean of nu, if quantized
    compressor: optax.OptState
    direction: optax.OptState


class Moments(NamedTuple):
    """Two moments as they lie in memory, and the factors that correct their bias.

    ``mask_momentum`` hands them to its direction as the argument ``moments``, so that
    ``layerwise_trust_ratio`` can compute a direction twice in place of keeping it.
    """

    mu: optax.Updates
    nu: optax.Updates
    of_mu: optax.Updates  # a factor for each leaf, whose b1 may be its own
    of_nu: jax.Array


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
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a worker's momentum, and sends of it what the exchange selects.

    With worker i's own gradient :math:`g_i` at step :math:`t = 1, 2, \ldots`, the
    selected coordinates :math:`M_t` (all, without a selection) and the wire format Q:

    .. math::

      x_i &= \beta_1 m_i + (1-\beta_1) g_i, \quad
      q_i = Q(x_i[M_t]), \quad e_i = x_i - q_i \\
      M &= \text{mean over workers of } q_i \text{, in the wire format again}

    Of two workers, and where all send to all, M is the mean of what they sent, and not
    rounded again. What a worker does not send waits in its momentum: it takes no
    memory, and nothing of a gradient is lost. Two kinds of exchange differ in one rule:

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

    Use it by itself in front of any direction. Where workers step by themselves without
    a selection (``outer``, ``sync_every`` above 1) nothing is sent here. Where a worker
    is a group of devices, put :func:`average_gradients` in front.

    Args:
      exchange: between whom, which coordinates when, and in what wire format.
      direction: what is done with :math:`\hat M`: any optax transformation. One whose
        ``update`` has an argument ``second_moment`` gets :math:`\hat v`. None:
        :math:`\hat M` itself, for links that follow.
      b1: decay rate of the momentum, in [0, 1); or a tree of them, or a prefix of it.
        An array, as of a schedule, counts as at least 0.1 where not all of x is sent.
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
    jax.tree.map(lambda rate: checks.check_decay_rate("b1", rate), b1)
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
    m_dtype = checks.check_dtype("mu_dtype", mu_dtype)
    if exchange.averages_momentum and (exchange.rounds_momentum or compressor):
        # What waits, e / b1, needs a b1 that is not 0, if it may be another one later.
        b1, share = jax.tree.map(_at_least, (b1, share))
    if compressor is None:  # between averages of the parameters nothing is sent
        sends = exchange.averages_momentum or exchange.selection is not None
        compressor = of_exchange(exchange) if sends else optax.identity()
    checks.check_transformation("compressor", compressor)
    sender = optax.with_extra_args_support(compressor)
    then = optax.identity() if direction is None else direction
    checks.check_transformation("direction", then)
    then = optax.with_extra_args_support(then)
    rule_at = functools.partial(
        Rule,
        agrees=exchange.averages_momentum,
        selects=exchange.selection is not None,
        share=share,
        nesterov=nesterov,
        bias_correction=bias_correction,
        b2=b2,
    )
    with_units = exchange.rounds_momentum and b2 is not None

    def init(params: optax.Params) -> MaskMomentumState:
        checks.check_floating(params, "params")
        broadcast_prefix("b1", b1, params)  # raises for a tree that does not fit
        compressor = without_residual(sender.init(params))
        check_keeps_nothing(compressor, params)
        mu = optax.tree.zeros_like(params, dtype=m_dtype)
        nu = nu_mean = None
        if b2 is not None:
            nu = optax.tree.zeros_like(params, dtype=jnp.float32)
        if with_units and isinstance(compressor, OfExchangeState):
            # Of a sum over its shards the type no longer varies over their axes.
            shards, zero = frozenset(exchange.shard_axes), jnp.zeros([], jnp.float32)
            nu_mean = jax.tree.map(
                lambda p: axes.vary_over(zero, axes.varying_axes(p) - shards), params
            )
        count, direction = jnp.zeros([], jnp.int32), then.init(params)
        # In a chain, and not within a state: an outer optimizer may have one.
        parts = jax.tree.leaves(direction, is_leaf=lambda x: hasattr(x, "_fields"))
        if any(isinstance(part, optax.TraceState) for part in parts):
            warnings.warn(
                "direction has a momentum of its own, optax.trace: take it without",
                stacklevel=2,
            )
        return MaskMomentumState(count, mu, nu, nu_mean, compressor, direction)

    def send(
        rule: Rule,
        leaves: _Leaves,
        xs: list[jax.Array],
        state: MaskMomentumState,
        params: optax.Params | None,
        extra_args: dict[str, Any],
    ) -> tuple[Answer, optax.OptState]:
        """What the compressor makes of each x, which it may round, and its state."""
        rows = leaves.joined.rows
        if isinstance(state.compressor, OfExchangeState):
            if with_units and state.nu_mean is None:
                raise ValueError(
                    f"payload={exchange.payload!r} needs a state with nu_mean, which a "
                    "single worker's has not: give jax.tree.map(jnp.mean, state.nu)"
                )
            request = Request(
                exchange,
                [row.leaf for row in rows],
                leaves.at,
                [unit_of(rule, row) for row in rows],
                [unit_of(rule, row.read_anew()) for row in rows],
            )
            out, new = sender.update(
                xs, state.compressor, **extra_args, request=request
            )
            if isinstance(out, Answer):
                return out, new
        tree = leaves.rebuild(leaves.joined.split(xs)[0])
        out, new = sender.update(tree, state.compressor, params, **extra_args)
        if rule.agrees and isinstance(out, Sent):
            sent = list(map(Sent, *map(leaves.join, out)))
            return Answer(xs, sent, None), new
        wholes = leaves.join(optax.tree.add(*out) if isinstance(out, Sent) else out)
        skip = rule.skip if rule.selects else None
        return Answer(xs, unless(skip, [row.m for row in rows], wholes), None), new

    def update(
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        poisoned: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MaskMomentumState]:
        axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
        checks.check_gradients(updates, state.mu)
        # Only a mean of all of the momentum tells all workers of a NaN.
        if poisoned is not None and not exchange.averages_momentum:
            skip, poisoned = pany(poisoned, exchange.axis_name), None
        extra_args |= {} if skip is None else {"skip": skip}
        rule = rule_at(next_step(state.count), skip)
        leaves = _read_leaves(exchange, b1, updates, state, params, rule)
        rows = leaves.joined.rows
        # 1. x, what this worker has.
        own = [ahead(rule, row) for row in rows]
        if poisoned is not None:  # M is NaN on all workers then
            own = [jnp.where(poisoned, _NAN, x) for x in own]
        # 2. M, the mean of what the workers send of it, and e, what this one does not.
        answer, compressor = send(rule, leaves, own, state, params, extra_args)
        if poisoned is not None:  # the same M came to all workers, who so agree
            tell = answer.is_finite
            skip = ~tell() if tell else pany(poisoned, exchange.axis_name)
            extra_args, rule = extra_args | {"skip": skip}, rule._replace(skip=skip)
        # 3. What the step takes, and what the worker keeps.
        if rule.agrees:  # or what was computed of g, m and v would be kept until now
            rows = [row.read_anew() for row in rows]
        both = zip(rows, answer.xs, answer.sent, strict=True)
        pairs = [take_and_keep(rule, row, x, sent) for row, x, sent in both]
        taken, mus = [x for x, _ in pairs], [m for _, m in pairs]
        # 4. v, of what all take; or of the worker's own gradient, since to agree on a v
        # of gradients would be to send them.
        xs = [row.g.astype(jnp.float32) for row in rows] if rule.selects else taken
        nus, nu_means = second_moments(rule, rows, xs)
        # 5. The direction, which reads the moments that were chosen: only then can the
        # new ones take the old ones' memory in a step that may be skipped.
        taken, mus, nus = leaves.joined.split(taken, mus, nus)
        taken, moments = _correct_biases(rule, leaves, taken, mus, nus)
        u, direction = then.update(
            leaves.rebuild(taken), state.direction, params, **extra_args, **moments
        )
        if not rule.selects:  # else the direction reads what is stored
            nus = computed_apart(nus)
        nu_means = leaves.joined.split_values(nu_means)
        # Leaves without a gradient stay as they were.
        new = MaskMomentumState(
            unless(skip, state.count, rule.step),
            keep_absent(leaves.rebuild(mus), state.mu),
            keep_absent(leaves.rebuild(nus), state.nu),
            keep_absent(leaves.rebuild(nu_means), state.nu_mean),
            unless(skip, state.compressor, compressor),
            unless(skip, state.direction, direction),
        )
        return u, chosen(skip, new)

    return on_shards(optax.GradientTransformationExtraArgs(init, update), exchange)


class Row(NamedTuple):
    """A leaf at one step, or several small ones that are joined."""

    leaf: Leaf
    g: jax.Array  # the worker's own gradient
    m: jax.Array  # the momentum in the state
    b1: ArrayLike  # its decay rate
    nu: jax.Array | None  # the second moment; None: there is none
    nu_mean: jax.Array | None  # its mean over the leaf, or each part; None: no units

    def read_anew(self) -> "Row":
        """The same, of which the compiler computes anew what it computed before."""
        g, m, nu = recompute((self.g, self.m, self.nu))
        return self._replace(g=g, m=m, nu=nu)


class Rule(NamedTuple):
    """Which of the two kinds of exchange it is, and what of the momentum is sent."""

    step: jax.Array  # from 1
    skip: jax.Array | None  # whether this step is skipped; None: none may be
    agrees: bool  # workers agree at each step: the step takes M, and e waits
    selects: bool  # a selection of the momentum is sent, and the momentum is M + e
    share: ArrayLike | None
    nesterov: bool
    bias_correction: bool
    b2: ArrayLike | None

    def scales(self, b1: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """What m is multiplied by in the state, and what the state is in x.

        Their product is the share of m in x.
        """
        one, _ = weights(1.0)
        share, _ = weights(b1 if self.share is None else self.share)
        if self.nesterov:
            share = share * share
        # The share of a number is that of all steps. So m times it can be kept, in
        # which an e has a place where the share is 0. An array may be another at the
        # next step, which needs m itself.
        return (one, share) if isinstance(share, jax.Array) else (share, one)

    def correction(self, b1: ArrayLike, ahead: bool = False) -> jax.Array:
        """The bias correction of the momentum, or of what is sent; 1 without one."""
        step = next_step(self.step) if ahead and self.nesterov else self.step
        return bias(b1, step) if self.bias_correction else jnp.float32(1)


def ahead(rule: Rule, row: Row) -> jax.Array:
    """What a worker has of a leaf: the momentum after its gradient, as it is sent."""
    g, m = row.g.astype(jnp.float32), row.m.astype(jnp.float32)
    if rule.selects:  # corrected after the exchange, since e stays in the momentum
        x = moved(m, g, row.b1).astype(row.m.dtype)
        # Chosen before it is sent: what is not sent stays in its place.
        return unless(rule.skip, row.m, x)
    scale, of_m = rule.scales(row.b1)
    later = rule.correction(row.b1, ahead=True)
    if rule.nesterov:
        # As optax has it: m is corrected as at the next step, g as at this one.
        b1, new = weights(row.b1)
        of_g = b1 * new / later + new / rule.correction(row.b1)
        return of_m * m / later + of_g * g
    return (of_m * m + (1 - scale * of_m) * g) / later


def take_and_keep(
    rule: Rule, row: Row, x: jax.Array, sent: Sent | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the step takes of a leaf, and the momentum that the worker keeps.

    ``sent`` is M and e, which is None where all was sent; or one array, M + e, by which
    workers step by themselves.
    """
    if rule.selects:  # the step takes M + e, and the worker keeps it
        assert not isinstance(sent, Sent)
        kept = sent.astype(row.m.dtype)
        return kept, kept
    g, m = row.g.astype(jnp.float32), row.m.astype(jnp.float32)
    (b1, new), (scale, of_m) = weights(row.b1), rule.scales(row.b1)
    correction = rule.correction(row.b1, ahead=True)  # by which x is divided
    kept = b1 * m + scale * new * g  # as if all of x had been sent
    is_plain = rule.share is None and not rule.nesterov
    if is_plain and rule.skip is None:
        # The same, in the place of x. A step that may be skipped needs the old m.
        kept = scale * (correction * x)
    if isinstance(sent, Sent):
        # The step takes M. It took nothing of e, which so counts 1 / b1 in the
        # momentum; the recurrence adds (1 - b1) / b1 of it.
        taken, unsent = sent
        if unsent is not None:
            kept = kept + new / of_m * correction * unsent
    else:
        # The step takes M + e, and the worker keeps it; optax.identity() leaves x.
        taken = sent
        if sent is not x:
            kept = kept + scale * correction * (sent - x)
    return taken, unless(rule.skip, row.m, kept.astype(row.m.dtype))


def second_moments(
    rule: Rule, rows: Sequence[Row], xs: Sequence[jax.Array]
) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
    r""":math:`v \leftarrow \beta_2 v + (1-\beta_2) x^2` of each row, and its means.

    In a skipped step as they were: the new v can then take the old one's memory.
    """
    nothing: list[jax.Array | None] = [None] * len(rows)
    b2, skip = rule.b2, rule.skip
    if b2 is None:
        return nothing, nothing
    squares = [jnp.square(x) for x in xs]
    nus = [
        moved(row.nu, square, b2)
        for row, square in zip(rows, squares, strict=True)
        if row.nu is not None
    ]
    nus = unless(skip, [row.nu for row in rows], nus)
    olds = [row.nu_mean for row in rows if row.nu_mean is not None]
    if not olds:
        return nus, nothing
    # A mean over v itself would be a pass that must end before the next step's first
    # code is made. The moving mean of means is the same number.
    leaves, means = [row.leaf for row in rows], []
    pairs = zip(leaves, squares, strict=True)
    sums = [sum_parts(leaf, x) if leaf.parts else jnp.sum(x) for leaf, x in pairs]
    if any(leaf.sharded for leaf in leaves):
        sums = psum_each(sums, [leaf.sharded for leaf in leaves])
    for old, leaf, total in zip(olds, leaves, sums, strict=True):
        sizes = np.array([part.size for part in leaf.parts] or leaf.size, np.float32)
        count = np.maximum(sizes * np.float32(axes.axis_size(leaf.sharded)), 1)
        means.append(moved(old, total / count, b2))
    return nus, unless(skip, olds, means)


def unit_of(rule: Rule, row: Row) -> Unit | None:
    r"""The unit of a row's codes, :math:`r = \sqrt{\hat v} + 0.05 \rho`."""
    if row.nu is None or row.nu_mean is None or rule.b2 is None:
        return None
    # v of the step before, on which all workers agree already: that of this step
    # follows from the mean that the units are for.
    correction = jnp.maximum(bias(rule.b2, rule.step - 1), _TINY)
    root = jnp.sqrt(row.nu / correction)
    # Of a coordinate whose v is 0 the unit is the floor: x / r stays finite.
    floor = _FLOOR * spread_over(row.leaf, jnp.sqrt(row.nu_mean / correction))
    size = jnp.where(floor > 0, root + floor, jnp.float32(1))  # 1 as long as v is 0
    return Unit(size, 1 - _FORGOTTEN * (root / size))


def weights(b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The decay b and 1 - b, in float32; of a number, constants of the program."""
    as_array = jnp.asarray if isinstance(b, jax.Array) else np.asarray
    both = as_array(b, np.float32), as_array(1 - b, np.float32)
    return cast(tuple[jax.Array, jax.Array], both)


def bias(b: ArrayLike, step: jax.Array) -> jax.Array:
    r""":math:`1-\beta^t`, rounded as in optax."""
    return 1 - weights(b)[0] ** step.astype(jnp.float32)


def moved(old: jax.Array, x: jax.Array, b: ArrayLike) -> jax.Array:
    r""":math:`\beta\,old + (1-\beta)\,x`, in float32."""
    keep, new = weights(b)
    return keep * old.astype(jnp.float32) + new * x.astype(jnp.float32)


def _at_least(b: ArrayLike) -> ArrayLike:
    """A decay rate that is an array, and so may change, not too near 0."""
    return jnp.maximum(b, _LEAST) if isinstance(b, jax.Array) else b


class _Leaves(NamedTuple):
    """The leaves that have a gradient."""

    updates: optax.Updates
    like: optax.Params
    b1s: list[ArrayLike]  # of each leaf
    joined: Joined  # of small ones, as rows
    at: AtStep | None  # what is selected of them
    rebuild: Callable[[Sequence[Any]], Any]  # a tree, of a value for each leaf

    def join(self, tree: Any) -> list[jax.Array]:
        """The array for each row, of a tree like the parameters."""
        rows, _ = present(self.updates, tree, like=self.like)
        return self.joined.join([in_shape(x, leaf) for leaf, _, x in rows])


def _read_leaves(
    exchange: Exchange,
    b1: Decays,
    updates: optax.Updates,
    state: MaskMomentumState,
    params: optax.Params | None,
    rule: Rule,
) -> _Leaves:
    """The rows of this step, those of small leaves joined."""
    # Leaves have the numbers that they have among the parameters: a gradient that is
    # None must not shift the selection, or the random bits, of those after it.
    like = state.mu if params is None else params
    found, rebuild = present(
        updates, state.mu, broadcast_prefix("b1", b1, state.mu), state.nu,
        state.nu_mean, like=like, layout=exchange.layout,
    )  # fmt: skip
    rows = [Row(*row) for row in found]
    at = selection_at(exchange, like, rule.step) if rule.selects else None
    # A compressor of the user's gets the leaves as they are.
    is_ours = isinstance(state.compressor, OfExchangeState)
    joined = join_rows(
        rows,
        lambda leaf: unit_to_join(exchange, at, leaf) if is_ours else None,
        same=["b1"],
        values=["nu_mean"],
    )
    b1s = [row.b1 for row in rows]
    return _Leaves(updates, like, b1s, joined, at, rebuild)


def _correct_biases(
    rule: Rule,
    leaves: _Leaves,
    taken: list[jax.Array],
    mus: list[jax.Array],
    nus: list[jax.Array | None],
) -> tuple[list[jax.Array], dict[str, Any]]:
    """The momentum of each leaf for the direction, and what it gets beside it."""
    given: dict[str, Any] = {}
    if rule.b2 is not None:
        of_nu = 1 / bias(rule.b2, rule.step)
        if rule.selects and not rule.bias_correction:
            of_nu = jnp.float32(1)
        hats = [of_nu * nu for nu in nus if nu is not None]
        given = {"second_moment": leaves.rebuild(hats), "of_second_moment": of_nu}
    if not rule.selects:  # what was sent is corrected already
        return taken, given
    # A factor for each rate, and not for each leaf: leaves that have it may be joined.
    of_rate = {id(b1): 1 / rule.correction(b1) for b1 in leaves.b1s}
    of_mus = [of_rate[id(b1)] for b1 in leaves.b1s]
    if given:
        # Factors, and not corrected moments, so that a direction may read m and v where
        # they lie: m / (1 - b1^t) would be one more array of their size.
        mu, nu = leaves.rebuild(mus), leaves.rebuild(nus)
        of_mu, of_nu = leaves.rebuild(of_mus), given["of_second_moment"]
        given["moments"] = Moments(mu, nu, of_mu, of_nu)
    pairs = zip(of_mus, mus, strict=True)
    return [factor * m.astype(jnp.float32) for factor, m in pairs], given
