"""JointSpar: an optimizer of which only the layers drawn are exchanged and updated."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.leaves import (
    broadcast_prefix,
    is_function,
    is_none,
    map_present,
    next_step,
)
from slamb_jax._core.rounding import upcast_f32
from slamb_jax.exchange.collectives import pany, pmean
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.jointspar import distribution
from slamb_jax.jointspar.distribution import JointSparState, active_layers
from slamb_jax.jointspar.train_if import Tree

Labels: TypeAlias = Tree  # of strings and None
Layers: TypeAlias = Labels | Callable[[optax.Params], Labels]


def jointspar(
    tx: optax.GradientTransformation,
    exchange: Exchange,
    layers: Layers,
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
    checks.check_integer("horizon", horizon, 1)
    checks.check_choice("sampling", sampling, ("shared", "per_worker"))
    checks.check_integer("seed", seed)
    draws_alone = sampling == "per_worker" and axis_name is not None
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> JointSparState:
        checks.check_floating(params, "params")
        names, labels = _labels(layers, params)
        missing = sorted(set(names) - set(jax.tree.leaves(labels)))
        if missing and jax.tree.leaves(params):
            raise ValueError(f"layers names {missing}, which no parameter has")
        distribution.least_probability(p_min, budget, len(names))
        log_p = np.float32(np.log(budget / len(names)))
        return JointSparState(
            count=jnp.zeros([], jnp.int32),
            seed=jnp.asarray(seed, jnp.int32),
            worker=jnp.zeros([], jnp.int32),
            log_p={name: jnp.asarray(log_p) for name in names},
            max_norm=jnp.zeros([], jnp.float32),
            inner=tx.init(params),
        )

    def update(
        updates: optax.Updates,
        state: JointSparState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, JointSparState]:
        checks.check_params(params)
        checks.check_real(updates, "updates")
        axes.check_local(updates, axis_name)
        names, tree = _labels(layers, params)
        treedef: Any = jax.tree.structure(params)
        labels, grads = map(treedef.flatten_up_to, (tree, updates))

        # 1. The layers that this worker drew, and those that move: of all workers.
        active, worker = active_layers(state), state.worker
        moves: dict[str | None, Any] = {None: True} | active
        if draws_alone:
            flags = pany(jnp.stack([*active.values()]), axis_name)
            moves |= dict(zip(names, flags, strict=True))
            worker = jax.lax.axis_index(axis_name)

        # 2. The mean of each layer's gradients, and its norm.
        means = [*map(jnp.zeros_like, treedef.flatten_up_to(params))]
        norms, rows = {}, [*zip(labels, grads, strict=True)]
        for name in (None, *names):
            places = [i for i, (x, g) in enumerate(rows) if x == name and g is not None]
            layer = [grads[i] for i in places]
            if name is None:
                layer = pmean(layer, axis_name)
            else:
                chance = jnp.exp(state.log_p[name])
                layer, norms[name] = average(layer, active[name], chance, moves[name])
            for i, mean in zip(places, layer, strict=True):
                means[i] = mean.astype(means[i].dtype)

        # 3. The step of tx, of the layers that move. It is not in the branches of the
        # exchange: the results of a branch take memory of their own, which costs more
        # than this arithmetic.
        mean = treedef.unflatten(means)
        steps, inner = tx.update(mean, state.inner, params, **extra_args)
        moving = treedef.unflatten(g is not None and moves[x] for x, g in rows)
        updates = map_present(
            lambda _, flag, step: jnp.where(flag, step, 0), updates, moving, steps
        )
        inner = keep_still(moving, state.inner, inner)

        # 4. The distribution that the next layers are drawn from.
        columns = (jax.tree.leaves(x) for x in (state.log_p, norms, active))
        log_p, norm, drawn = map(jnp.stack, columns)
        log_p, max_norm = distribution.update_distribution(
            log_p, norm, drawn, state.max_norm, budget, p_min, horizon
        )
        chances = dict(zip(names, log_p, strict=True))
        fields = next_step(state.count), state.seed, worker, chances, max_norm, inner
        return updates, JointSparState(*fields)

    def average(
        grads: list[jax.Array], active: jax.Array, chance: jax.Array, moves: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Means of a layer's gradients over p, and its norm; 0 if it stands still."""
        wide = [jnp.where(active, upcast_f32(g), 0) for g in grads]
        norm = optax.tree.norm(wide).astype(jnp.float32)
        pairs = zip(wide, grads, strict=True)
        shares = [(x / chance.astype(x.dtype)).astype(g.dtype) for x, g in pairs]
        if axes.axis_size(axis_name) == 1:
            return shares, norm
        sent = shares if draws_alone else [*shares, norm]
        # All workers take the same branch.
        zeros = optax.tree.zeros_like
        means = axes.cond(moves, lambda x: pmean(x, axis_name), zeros, sent)
        return (means, norm) if draws_alone else (means[:-1], means[-1])

    def keep_still(moving: Tree, old: optax.OptState, new: optax.OptState) -> Tree:
        """``new``, with the parts of layers that stand still from ``old``."""

        def is_masked(x: object) -> bool:  # a parameter that a part of tx does not get
            return isinstance(x, optax.MaskedNode)

        moving = optax.tree.map_params(
            tx, lambda x, moves: x if is_masked(x) else moves, new, moving,
            transform_non_params=lambda _: True, is_leaf=is_masked,
        )  # fmt: skip
        return jax.tree.map(jnp.where, moving, new, old)

    return optax.GradientTransformationExtraArgs(init, update)


def _axis_of(exchange: Exchange) -> axes.AxisName | None:
    """The axis of an exchange; raises for settings that would have no effect."""
    plain = Exchange(check_exchange(exchange).axis_name)
    if exchange not in (plain, dataclasses.replace(plain, payload=None)):
        raise ValueError(
            f"exchange must be {plain}, whose axis JointSpar uses, got {exchange}"
        )
    return exchange.axis_name


def _labels(layers: Layers, params: optax.Params) -> tuple[list[str], Labels]:
    """The distinct labels, sorted, and a tree of the label of each parameter."""
    tree = layers(params) if is_function(layers) else layers
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, str):
            where = f"layers{jax.tree_util.keystr(path)}"
            raise ValueError(f"{where} must be a string or None, got {label!r}")
    names = sorted(set(jax.tree.leaves(tree)))
    if not names:
        raise ValueError(f"layers must label at least one layer, got {tree!r}")
    return names, broadcast_prefix("layers", tree, params, is_leaf=is_none)
