"""Momentum of which a worker sends what the exchange selects, and keeps the rest."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core import axes, checks
from slamb_jax._core.joining import Joined, join_rows
from slamb_jax._core.leaves import (
    Leaf,
    arrays_of,
    broadcast_prefix,
    chosen,
    keep_absent,
    present,
    unless,
)
from slamb_jax._core.recompute import computed_apart
from slamb_jax._core.rounding import next_step
from slamb_jax.compressors.codec import Sent
from slamb_jax.compressors.of_exchange import (
    Answer,
    Request,
    of_exchange,
    takes_requests,
    unit_to_join,
)
from slamb_jax.exchange.selections import AtStep, selection_at
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links._momentum import (
    Ahead,
    Decays,
    Moments,
    Row,
    Rule,
    ahead,
    correct_v,
    second_moments,
    take_and_keep,
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
      b1: decay rate of the momentum, in [0, 1); or a tree of them, or a prefix of it.
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
        exchange.rounds_momentum,
        b1,
        b2,
        checks.check_dtype("mu_dtype", mu_dtype),
        checks.check_dtype("nu_dtype", nu_dtype),
    )
    tx = optax.GradientTransformationExtraArgs(link.init, link.update)
    return on_shards(tx, exchange)


class _Link(NamedTuple):
    """The settings of one link, and its two functions."""

    exchange: Exchange
    direction: optax.GradientTransformationExtraArgs
    compressor: optax.GradientTransformationExtraArgs
    rule: Rule
    rounds: bool  # the mean of all of the momentum
    b1: Decays
    b2: ArrayLike | None
    mu_dtype: jnp.dtype
    nu_dtype: jnp.dtype

    def init(self, params: optax.Params) -> MaskMomentumState:
        checks.check_floating(params, "params")
        compressor = without_residual(self.compressor.init(params))
        check_keeps_nothing(compressor, params)
        mu = optax.tree.zeros_like(params, dtype=self.mu_dtype)
        nu = nu_mean = None
        if self.b2 is not None:
            nu = optax.tree.zeros_like(params, dtype=self.nu_dtype)
        if self._has_units(compressor):
            # Of a sum over its shards the type no longer varies over their axes.
            shards = frozenset(self.exchange.shard_axes)
            zero = jnp.zeros([], jnp.float32)
            nu_mean = jax.tree.map(
                lambda p: axes.vary_over(zero, axes.varying_axes(p) - shards), params
            )
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
        answer, compressor = self._send(leaves, own, state, params, step, extra_args)
        own = [a._replace(x=x) for a, x in zip(own, answer.xs, strict=True)]
        # 3. What the step takes, and what the worker keeps.
        if rule.agrees:  # or what was computed of g, m and v would be kept until now
            rows = [row.read_anew() for row in rows]
        pairs = list(map(take_and_keep, [rule] * len(rows), rows, own, answer.sent))
        taken, mus = [x for x, _ in pairs], [m for _, m in pairs]
        olds = answer.sent if rule.selects else [row.m for row in rows]
        mus = unless(skip, olds, mus)
        # 4. v, of what all take; or of the worker's own gradient, since to agree on a v
        # of gradients would be to send them.
        xs = [row.g.astype(jnp.float32) for row in rows] if rule.selects else taken
        nus, nu_means = second_moments(rows, xs, self.b2, step, skip)
        # 5. The direction, which reads the moments that were chosen: only then can the
        # new ones take the old ones' memory in a step that may be skipped.
        taken, mus, nus = leaves.joined.split(taken, mus, nus)
        given = self._moments(leaves, mus, nus, step)
        if rule.selects:
            factors = zip(leaves.corrections(rule, step), mus, strict=True)
            taken = [factor * m.astype(jnp.float32) for factor, m in factors]
        u, direction = self.direction.update(
            leaves.rebuild(taken), state.direction, params, **extra_args, **given
        )
        old = state.count, state.compressor, state.direction
        count, compressor, direction = unless(skip, old, (step, compressor, direction))
        if not rule.selects:  # else the direction reads what is stored
            nus = computed_apart(nus)
        nu_means = leaves.joined.split_values(nu_means)
        mu, nu = leaves.fill(mus, state.mu), leaves.fill(nus, state.nu)
        nu_mean = leaves.fill(nu_means, state.nu_mean)
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
        b1s = broadcast_prefix("b1", self.b1, state.mu)
        found, rebuild = present(
            updates, state.mu, b1s, state.nu, state.nu_mean,
            like=like, layout=self.exchange.layout,
        )  # fmt: skip
        rows = [Row(*row) for row in found]
        at = selection_at(self.exchange, like, step) if self.rule.selects else None

        def unit(leaf: Leaf) -> int | None:
            # A compressor of the user's gets the leaves as they are.
            is_ours = takes_requests(state.compressor)
            return unit_to_join(self.exchange, at, leaf) if is_ours else None

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
    ) -> tuple[Answer, optax.OptState]:
        """What the compressor makes of each x, and its state."""
        rows, xs = leaves.joined.rows, [x for x, _ in own]
        if takes_requests(state.compressor):
            request = Request(
                self.exchange,
                leaves.joined.leaves,
                leaves.at,
                [unit_of(row, self.b2, step) for row in rows],
                [unit_of(row.read_anew(), self.b2, step) for row in rows],
            )
            out, new = self.compressor.update(
                xs, state.compressor, **extra_args, request=request
            )
            if isinstance(out, Answer):
                return out, new
        tree = leaves.rebuild(leaves.joined.split(xs)[0])
        out, new = self.compressor.update(tree, state.compressor, params, **extra_args)
        if self.rule.agrees and isinstance(out, Sent):
            return Answer(xs, list(map(Sent, *map(leaves.join, out)))), new
        wholes = leaves.join(optax.tree.add(*out) if isinstance(out, Sent) else out)
        skip = extra_args.get("skip") if self.rule.selects else None
        return Answer(xs, unless(skip, [row.m for row in rows], wholes)), new

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
        of_nu = correct_v(self.rule, self.b2, step)
        hats = [of_nu * nu.astype(jnp.float32) for nu in nus if nu is not None]
        given = {"second_moment": leaves.rebuild(hats), "of_second_moment": of_nu}
        if self.rule.selects:
            # Factors, and not corrected moments, so that a direction may read m and v
            # where they lie: m / (1 - b1^t) would be one more array of their size.
            of_mus = leaves.corrections(self.rule, step)
            mu, nu, of_mu = map(leaves.rebuild, (mus, nus, of_mus))
            given["moments"] = Moments(mu, nu, of_mu, of_nu)
        return given

    def _has_units(self, compressor: optax.OptState) -> bool:
        """Whether the compressor of this state sends codes in units of v."""
        return takes_requests(compressor) and self.rounds and self.b2 is not None

    def _check(self, updates: optax.Updates, state: MaskMomentumState) -> None:
        """Raises for gradients that do not fit, or that were averaged already."""
        exchange = self.exchange
        axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
        checks.check_gradients(updates, state.mu)
        if self._has_units(state.compressor) and state.nu_mean is None:
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

    def corrections(self, rule: Rule, step: jax.Array) -> list[jax.Array]:
        """The factor of each leaf's momentum that corrects its bias."""
        # One for each rate, and not for each leaf: leaves that have it may be joined.
        factors = {id(b1): 1 / rule.correction(b1, step) for b1 in self.b1s}
        return [factors[id(b1)] for b1 in self.b1s]
