"""JointSpar: an optimizer of which only the layers drawn are exchanged and updated."""

import dataclasses
from typing import Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.leaves import broadcast_prefix, is_none, map_present, tree_for
from slamb_jax._core.rounding import next_step, upcast_f32
from slamb_jax.exchange.collectives import pany, pmean
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.jointspar import distribution
from slamb_jax.jointspar.distribution import JointSparState, active_layers


def jointspar(
    tx: optax.GradientTransformation,
    exchange: Exchange,
    layers: Any,
    budget: float,
    *,
    p_min: float | None = None,
    horizon: int = 1000,
    sampling: Literal["shared", "per_worker"] = "shared",
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""JointSpar: computes, communicates and steps only layers drawn at each step.

    Each of n workers passes its own gradient g, which is **not** averaged. For every
    layer d of D,

    .. math::

      Z_d &\sim \operatorname{Bernoulli}(p_d), \quad S = \{d : Z_d = 1\} \\
      \hat g_d &= \text{mean over the workers of } Z_d\, g_d / p_d \\
      x_d &\leftarrow x_d + tx(\hat g)_d \quad \text{for } d \in S

    so that :math:`\hat g` is an unbiased estimate of the mean gradient, and
    :math:`\sum_d p_d = s`, the budget. The probabilities follow the norms of the
    layers' gradients: with L the largest norm so far, T the horizon and
    :math:`w_d = p_d` for a layer not drawn,

    .. math::

      w_d &= p_d \exp\Big(-\frac{\alpha}{p_d} \Big(\frac{L^2}{p_{min}^2} -
        \frac{\|g_d\|^2}{p_d^2}\Big)\Big), \quad
        \alpha = \frac{p_{min}^2}{L^2} \sqrt{\frac{2 s \log(D/s)}{T D}} \\
      p &\leftarrow \operatorname{argmin}_q \{ \operatorname{KL}(q \| w) :
        \textstyle\sum_d q_d = s,\ p_{min} \le q_d \le 1 \}.

    A layer that no worker drew keeps its parameters and its part of the state of
    ``tx``, such as a momentum; counts go on. With s = D this is ``tx`` of the mean
    gradient. The paper's JointSpar has ``optax.sgd`` for ``tx``, its JointSpar-LARS
    ``optax.lars``; ``"shared"`` sampling, layers that keep their momentum and this
    :math:`\alpha` are not in it.

    Call :func:`active_layers` for S before the gradient is computed, and let
    :func:`train_if` skip the rest of the backward pass. Each worker holds a copy of the
    parameters and of this state (:func:`slamb_jax.replicate`).

    Args:
      tx: an optimizer that does not exchange, such as ``optax.lars(0.1)``.
      exchange: the axis of the workers. Other settings must be the default: gradients
        are averaged densely at every step.
      layers: the label of each parameter's layer, a string; None for parameters that
        are trained at every step. A tree like the parameters, a prefix of it, or a
        function of the parameters that returns one.
      budget: s in (0, D], the expected number of layers per step.
      p_min: the least probability of a layer, in (0, s/D]. None: half of s/D; with much
        less, the offset :math:`L^2/p_{min}^2` makes p a random walk.
      horizon: T, about the number of steps of the run.
      sampling: ``"shared"``: all workers draw the same layers, by the mean of their
        norms. ``"per_worker"``, as in the paper: each draws its own (from the second
        step on), and a layer is exchanged if any worker drew it.
      seed: of the draws; must be the same on all workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: for an argument out of range, and for an exchange of other settings;
        in ``init``, if ``budget`` or ``p_min`` does not suit the number of layers, or
        ``layers`` the parameters; in ``update``, without ``params``, for an unbound
        axis, and for gradients that were averaged already, if types show it.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from slamb_jax import Exchange, jointspar
      >>> params, layers = {"a": jnp.ones(2), "b": jnp.ones(2)}, {"a": "a", "b": "b"}
      >>> tx = jointspar.jointspar(optax.lars(0.1), Exchange(), layers, budget=1)
      >>> state = tx.init(params)
      >>> active = jointspar.active_layers(state)
      >>> grads = {name: jnp.where(active[name], jnp.ones(2), 0) for name in params}
      >>> updates, state = tx.update(grads, state, params)
      >>> all(bool(updates[name].any()) == bool(active[name]) for name in params)
      True

    References:
      Liu & Mozafari, `Communication-efficient Distributed Learning for Large Batch
      Optimization <https://proceedings.mlr.press/v162/liu22n.html>`_, ICML 2022.
    """
    checks.check_transformation("tx", tx)
    axis_name = _axis_of(exchange)
    for name, value in (("layers", layers), ("budget", budget), ("p_min", p_min)):
        checks.check_static(name, value)
    checks.check_range("budget", budget, 0.0, open_low=True)
    if p_min is not None:
        checks.check_range("p_min", p_min, 0.0, 1.0, open_low=True)
    checks.check_integer("horizon", horizon, 1)
    checks.check_choice("sampling", sampling, ("shared", "per_worker"))
    checks.check_integer("seed", seed)
    draws_alone = sampling == "per_worker" and axis_name is not None
    tx = optax.with_extra_args_support(tx)
    link = _Link(tx, axis_name, layers, budget, p_min, horizon, draws_alone, seed)
    return optax.GradientTransformationExtraArgs(link.init, link.update)


class _Link(NamedTuple):
    """The settings of one link, and its two functions."""

    tx: optax.GradientTransformationExtraArgs
    axis_name: axes.AxisName | None
    layers: Any
    budget: float
    p_min: float | None
    horizon: int
    draws_alone: bool
    seed: int

    def init(self, params: optax.Params) -> JointSparState:
        checks.check_floating(params, "params")
        names, labels = _labels(self.layers, params)
        missing = sorted(set(names) - set(jax.tree.leaves(labels)))
        if missing and jax.tree.leaves(params):
            found = ", ".join(map(repr, missing))
            raise ValueError(f"layers names {found}, of which there are no parameters")
        distribution.least_probability(self.p_min, self.budget, len(names))
        log_p = np.float32(np.log(self.budget / len(names)))
        return JointSparState(
            count=jnp.zeros([], jnp.int32),
            seed=jnp.asarray(self.seed, jnp.int32),
            worker=jnp.zeros([], jnp.int32),
            log_p={name: jnp.asarray(log_p) for name in names},
            max_norm=jnp.zeros([], jnp.float32),
            inner=self.tx.init(params),
        )

    def update(
        self,
        updates: optax.Updates,
        state: JointSparState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, JointSparState]:
        checks.check_params(params)
        checks.check_real(updates, "updates")
        axes.check_local(updates, self.axis_name)
        names, tree = _labels(self.layers, params)
        treedef: Any = jax.tree.structure(params)
        labels, grads = map(treedef.flatten_up_to, (tree, updates))
        active = active_layers(state)
        moves: dict[Any, Any] = {None: True} | active
        worker = state.worker
        if self.draws_alone:  # a layer moves if at least one worker drew it
            flags = pany(jnp.stack([*active.values()]), self.axis_name)
            moves |= dict(zip(names, flags, strict=True))
            worker = axes.worker_index(self.axis_name)
        rows, norms = [*zip(labels, grads, strict=True)], {}
        means = [*map(jnp.zeros_like, treedef.flatten_up_to(params))]
        for name in (None, *names):
            here = [i for i, (x, g) in enumerate(rows) if x == name and g is not None]
            new = [grads[i] for i in here]
            if name is None:
                new = pmean(new, self.axis_name)
            else:
                at = active[name], state.log_p[name], moves[name]
                new, norms[name] = self._mean(new, *at)
            for i, mean in zip(here, new, strict=True):
                means[i] = mean.astype(means[i].dtype)

        # Not in the branches of the exchange: the results of a branch take memory of
        # their own, which costs more than this arithmetic.
        mean = treedef.unflatten(means)
        steps, inner = self.tx.update(mean, state.inner, params, **extra_args)
        moving = treedef.unflatten(g is not None and moves[x] for x, g in rows)
        updates = map_present(lambda _, *at: _zero_unless(*at), updates, moving, steps)
        columns = (jax.tree.leaves(x) for x in (state.log_p, norms, active))
        log_p, norm, drawn = map(jnp.stack, columns)
        settings = self.budget, self.p_min, self.horizon
        log_p, max_norm = distribution.update_distribution(
            log_p, norm, drawn, state.max_norm, *settings
        )
        by_name = dict(zip(names, log_p, strict=True))
        inner = self._kept(moving, state.inner, inner)
        count = next_step(state.count)
        of_next = count, state.seed, worker, by_name, max_norm, inner
        return updates, JointSparState(*of_next)

    def _mean(
        self, grads: list[Any], active: jax.Array, log_p: jax.Array, moves: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Means of a layer's gradients over p, and its norm; 0 if it stands still."""
        wide = [*map(upcast_f32, grads)]
        wide = [_zero_unless(active, x) for x in wide]
        norm, p = optax.tree.norm(wide).astype(jnp.float32), jnp.exp(log_p)
        pairs = zip(wide, grads, strict=True)
        shares = [(x / p.astype(x.dtype)).astype(g.dtype) for x, g in pairs]
        if axes.axis_size(self.axis_name) == 1:
            return shares, norm
        means = axes.cond(  # all workers take the same branch
            moves,
            lambda arrays: pmean(arrays, self.axis_name),
            lambda arrays: [*map(jnp.zeros_like, arrays)],
            shares if self.draws_alone else [*shares, norm],
        )
        return (means, norm) if self.draws_alone else (means[:-1], means[-1])

    def _kept(self, moving: Any, old: optax.OptState, new: optax.OptState) -> Any:
        """``new``, with the parts of layers that stand still from ``old``."""

        def is_masked(x: object) -> bool:  # a parameter that a part of tx does not get
            return isinstance(x, optax.MaskedNode)

        def moves(x: Any, moves: Any) -> Any:
            return x if is_masked(x) else moves

        always = {"transform_non_params": lambda _: True, "is_leaf": is_masked}
        moving = optax.tree.map_params(self.tx, moves, new, moving, **always)
        return jax.tree.map(jnp.where, moving, new, old)


def _zero_unless(flag: Any, x: jax.Array) -> jax.Array:
    return jnp.where(flag, x, jnp.zeros_like(x))


def _axis_of(exchange: Exchange) -> axes.AxisName | None:
    """The axis of an exchange; raises for settings that would have no effect."""
    plain = Exchange(check_exchange(exchange).axis_name)
    if exchange not in (plain, dataclasses.replace(plain, payload=None)):
        raise ValueError(
            f"exchange must be {plain}, got {exchange}: JointSpar averages gradients "
            "densely and at every step, and uses only the axis of an exchange"
        )
    return exchange.axis_name


def _labels(layers: Any, params: chex.ArrayTree) -> tuple[list[str], chex.ArrayTree]:
    """The distinct labels, sorted, and a tree of the label of each parameter."""
    tree = tree_for(layers, params)
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, str):
            raise ValueError(
                "layers must have strings or None for labels, got "
                f"{label!r} at layers{jax.tree_util.keystr(path)}"
            )
    names = sorted(set(jax.tree.leaves(tree)))
    if not names:
        raise ValueError(f"layers must label at least one layer, got {tree!r}")
    return names, broadcast_prefix("layers", tree, params, is_leaf=is_none)
