"""JointSpar and JointSpar-LARS: layers are drawn before their gradients are taken."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from slamb_jax._axes import AxisName
from slamb_jax._checks import check_params, check_range, check_static
from slamb_jax._labels import Layers
from slamb_jax._layer_steps import Settings, layer_steps
from slamb_jax._trust_ratio import decay_at, decay_mask

JOINTSPAR_STATIC_ARGS = (
    "layers",
    "budget",
    "p_min",
    "horizon",
    "axis_name",
    "sampling",
    "nesterov",
    "seed",
)
"""Arguments of :func:`jointspar` and :func:`jointspar_lars` that cannot be traced: what
to pass as ``static_args`` to ``optax.inject_hyperparams``, with the latter's masks."""


def jointspar(
    learning_rate: optax.ScalarOrSchedule,
    layers: Layers,
    budget: float,
    *,
    p_min: float | None = None,
    horizon: int = 1000,
    axis_name: AxisName | None = None,
    sampling: str = "shared",
    momentum: Any = 0.9,
    nesterov: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""JointSpar: SGD that neither computes nor sends the layers not drawn.

    D layers, n workers, each with its own gradient g, which is **not** averaged. At
    each step, for every layer d,

    .. math::

      Z_d &\sim \operatorname{Bernoulli}(p_d), \quad S = \{d : Z_d = 1\} \\
      \hat g_d &= \text{mean over workers of } Z_d\, g_d / p_d \\
      m_d &\leftarrow \mu m_d + \hat g_d, \quad
        x_d \leftarrow x_d - lr\, m_d \quad \text{for } d \in S \\
      p &\leftarrow \text{the step of } \texttt{update\_distribution}

    so that :math:`\hat g` is an unbiased estimate of the gradient and
    :math:`\sum_d p_d = s`, the budget, is the number of layers computed per step on
    average. A layer that nobody drew does not move, and neither does its momentum.
    With s = D it is ``optax.sgd`` of the mean gradient.

    Ask :func:`active_layers` for S before the gradient is taken, and let
    :func:`train_if` skip the others' part of the backward pass. Each layer's exchange
    and step stand in a real conditional of their own. Each worker holds its own copy
    of the parameters and of this state, though they stay alike: :func:`replicate` and
    :func:`per_worker_step` arrange that.

    Decided here, where the paper leaves it open: ``"shared"`` sampling; that what is
    not drawn stands still; :math:`\alpha`.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      layers: the label of the layer that each parameter belongs to, a string; None for
        what is trained and sent at every step, like norms and embeddings. A tree of the
        parameters' structure or a prefix of it, or a function of the parameters
        that gives one, as in ``optax.multi_transform``.
      budget: s in (0, D], layers per step.
      p_min: the least probability of a layer, in (0, s/D]. None for half of s/D: much
        less, and the offset :math:`L^2/p_{min}^2` of the loss makes p a random walk.
      horizon: T, the steps that the run will take, more or less: the distribution
        moves by :math:`1/\sqrt T`.
      axis_name: the mesh axis (or a tuple of axes) over which the workers exchange.
        None: a single worker.
      sampling: ``"shared"``: one draw and one distribution for all, of the norms
        averaged over the workers; what nobody computed is not sent. ``"per_worker"``:
        the paper's, each with its own (from the second step on); a layer is sent when
        anyone drew it, which with many workers is nearly always.
      momentum: :math:`\mu` in [0, 1).
      nesterov: as in ``optax.sgd``.
      seed: of the draws; must be the same on all workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for an argument out of range; in ``init``, for ``budget``
        and ``p_min`` that do not suit the number of layers, and for labels that do not
        fit the parameters; in ``update``, for an unbound axis, and for gradients that
        were averaged already where the types show it (``shard_map`` with
        ``check_vma=True``).

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> dense = lambda w, x: jnp.tanh(x @ w)
      >>> params = {"a": jnp.eye(2), "b": jnp.eye(2)}
      >>> tx = slamb_jax.jointspar(0.1, {"a": "a", "b": "b"}, budget=1)
      >>> @jax.jit
      ... def step(params, state):
      ...     active = slamb_jax.active_layers(state)
      ...     def loss(params):
      ...         x = jnp.ones((1, 2))
      ...         x = slamb_jax.train_if(active, "a", dense, below=())(params["a"], x)
      ...         x = slamb_jax.train_if(active, "b", dense)(params["b"], x)
      ...         return jnp.sum(x**2)
      ...     value, grads = jax.value_and_grad(loss)(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, value
      >>> state = tx.init(params)
      >>> for _ in range(40):
      ...     params, state, value = step(params, state)
      >>> bool(value < 0.1)
      True

    References:
      Liu & Mozafari, `Communication-efficient Distributed Learning for Large Batch
      Optimization <https://proceedings.mlr.press/v162/liu22n.html>`_, ICML 2022.
    """
    check_static(JOINTSPAR_STATIC_ARGS, locals(), "JOINTSPAR_STATIC_ARGS")
    check_range("learning_rate", learning_rate, schedule=True)
    check_range("momentum", momentum, 0.0, 1.0, open_high=True)

    def rules(count: jax.Array, updates: Any, params: Any) -> Any:
        del params
        rate = learning_rate(count) if callable(learning_rate) else learning_rate

        def rule(g: jax.Array, trace: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
            del p
            u, trace = _traced(g, trace, momentum, nesterov)
            return _scaled(u, rate), trace

        return _for_each(rule, updates)

    settings = Settings(layers, budget, p_min, horizon, axis_name, sampling, seed)
    return layer_steps(settings, rules)


def jointspar_lars(
    learning_rate: optax.ScalarOrSchedule,
    layers: Layers,
    budget: float,
    *,
    p_min: float | None = None,
    horizon: int = 1000,
    axis_name: AxisName | None = None,
    sampling: str = "shared",
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = True,
    trust_coefficient: Any = 0.001,
    eps: Any = 0.0,
    trust_ratio_mask: Any = True,
    momentum: Any = 0.9,
    nesterov: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""JointSpar-LARS: LARS that neither computes nor sends the layers not drawn.

    As :func:`jointspar`, with the step of LARS for each parameter x of a layer in S:

    .. math::

      u &= \hat g + \lambda x \\
      m &\leftarrow \mu m + lr\, \eta \frac{\|x\|}{\|u\| + \varepsilon}\, u, \quad
      x \leftarrow x - m

    the ratio 1 where a norm is 0. The norms are taken after the mean over the workers.
    With s = D it is ``optax.lars`` of the mean gradient. (Without decay the ratio takes
    1/p out again: a drawn layer steps as far as in LARS, whatever its probability.)

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      layers: as in :func:`jointspar`.
      budget: s in (0, D], layers per step.
      p_min: as in :func:`jointspar`.
      horizon: as in :func:`jointspar`.
      axis_name: as in :func:`jointspar`.
      sampling: as in :func:`jointspar`.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      weight_decay_mask: which parameters decay, as in ``optax.lars``.
      trust_coefficient: :math:`\eta`, positive.
      eps: :math:`\varepsilon`, not negative.
      trust_ratio_mask: which parameters have a ratio, as in ``optax.lars``.
      momentum: :math:`\mu` in [0, 1).
      nesterov: as in ``optax.lars``.
      seed: of the draws; must be the same on all workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: as :func:`jointspar`; and in ``update`` without ``params``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.0, 2.0])}
      >>> tx = slamb_jax.jointspar_lars(1.0, {"a": "a", "b": "b"}, 1, momentum=0.0)
      >>> state = tx.init(params)
      >>> active = slamb_jax.active_layers(state)
      >>> grads = {name: jnp.where(active[name], jnp.ones(2), 0) for name in params}
      >>> updates, state = tx.update(grads, state, params)
      >>> all(bool(updates[name].any()) == bool(active[name]) for name in params)
      True

    References:
      Liu & Mozafari, `Communication-efficient Distributed Learning for Large Batch
      Optimization <https://proceedings.mlr.press/v162/liu22n.html>`_, ICML 2022; You et
      al., `Large Batch Training of Convolutional Networks
      <https://arxiv.org/abs/1708.03888>`_, 2017.
    """
    static = (*JOINTSPAR_STATIC_ARGS, "weight_decay_mask", "trust_ratio_mask")
    check_static(static, locals(), "JOINTSPAR_STATIC_ARGS")
    check_range("learning_rate", learning_rate, schedule=True)
    check_range("weight_decay", weight_decay, 0.0, schedule=True)
    check_range("trust_coefficient", trust_coefficient, 0.0, open_low=True)
    check_range("eps", eps, 0.0)
    check_range("momentum", momentum, 0.0, 1.0, open_high=True)
    trust = optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps)

    def rules(count: jax.Array, updates: Any, params: Any) -> Any:
        del updates
        check_params(params)
        rate = learning_rate(count) if callable(learning_rate) else learning_rate
        decay = decay_at(weight_decay, count)

        def rule_of(decays: bool, scales: bool) -> Any:
            def rule(
                g: jax.Array, trace: jax.Array, p: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
                u = g + decay.astype(p.dtype) * p if decays and decay is not None else g
                if scales:
                    u, _ = trust.update(u, optax.EmptyState(), p)
                return _traced(_scaled(u, rate), trace, momentum, nesterov)

            return rule

        masks = (decay_mask(m, params) for m in (weight_decay_mask, trust_ratio_mask))
        return jax.tree.map(rule_of, *masks)

    settings = Settings(layers, budget, p_min, horizon, axis_name, sampling, seed)
    return layer_steps(settings, rules)


def _traced(
    u: jax.Array, trace: jax.Array, momentum: Any, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """As ``optax.trace``: the direction, and the new trace."""
    momentum = jnp.asarray(momentum, trace.dtype)
    trace = u + momentum * trace
    return u + momentum * trace if nesterov else trace, trace


def _scaled(u: jax.Array, rate: Any) -> jax.Array:
    return jnp.asarray(-rate, u.dtype) * u


def _for_each(rule: Any, tree: Any) -> Any:
    return jax.tree.map(lambda _: rule, tree, is_leaf=lambda x: x is None)
