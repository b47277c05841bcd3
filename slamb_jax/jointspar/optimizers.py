"""JointSpar and JointSpar-LARS: SGD and LARS on the layers drawn at each step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from slamb_jax._checks import check_bools, check_params, check_range, check_static
from slamb_jax.exchange import Exchange
from slamb_jax.jointspar.sampling import Layers, Sampling, sample_layers

_STATIC = (
    "exchange", "layers", "budget", "p_min", "horizon", "sampling", "nesterov", "seed"
)  # fmt: skip


def jointspar(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    layers: Layers,
    budget: float,
    *,
    p_min: float | None = None,
    horizon: int = 1000,
    sampling: Sampling = "shared",
    momentum: ArrayLike = 0.9,
    nesterov: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""JointSpar: SGD that computes and communicates only layers drawn at each step.

    Each of n workers passes its own gradient g, which is **not** averaged. For every
    layer d of D,

    .. math::

      Z_d &\sim \operatorname{Bernoulli}(p_d), \quad S = \{d : Z_d = 1\} \\
      \hat g_d &= \text{mean over the workers of } Z_d\, g_d / p_d \\
      m_d &\leftarrow \mu m_d + \hat g_d, \quad
        x_d \leftarrow x_d - lr\, m_d \quad \text{for } d \in S

    so that :math:`\hat g` is an unbiased estimate of the mean gradient, and
    :math:`\sum_d p_d = s`, the budget, is the expected number of layers computed per
    step. The probabilities follow the norms of the layers' gradients: with L the
    largest norm so far, T the horizon and :math:`w_d = p_d` for a layer not drawn,

    .. math::

      w_d &= p_d \exp\Big(-\frac{\alpha}{p_d} \Big(\frac{L^2}{p_{min}^2} -
        \frac{\|g_d\|^2}{p_d^2}\Big)\Big), \quad
        \alpha = \frac{p_{min}^2}{L^2} \sqrt{\frac{2 s \log(D/s)}{T D}} \\
      p &\leftarrow \operatorname{argmin}_q \{ \operatorname{KL}(q \| w) :
        \textstyle\sum_d q_d = s,\ p_{min} \le q_d \le 1 \}.

    A layer that no worker drew keeps its parameters and its momentum. With s = D this
    is ``optax.sgd`` of the mean gradient. The paper has neither ``"shared"`` sampling,
    nor layers that keep their momentum, nor this :math:`\alpha`.

    Call :func:`active_layers` for S before the gradient is computed, and let
    :func:`train_if` skip the rest of the backward pass. Each worker holds a copy of the
    parameters and of this state (:func:`slamb_jax.replicate`).

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: an :class:`slamb_jax.Exchange` with the axis of the workers. Its other
        settings must be the default: gradients are averaged densely at every step.
      layers: the label of each parameter's layer, a string; None for parameters that
        are trained and exchanged at every step. A tree of the parameters' structure, a
        prefix of it, or a function of the parameters that returns one.
      budget: s in (0, D], the expected number of layers per step.
      p_min: the least probability of a layer, in (0, s/D]. None: half of s/D; with much
        less, the offset :math:`L^2/p_{min}^2` makes p a random walk.
      horizon: T, about the number of steps of the run.
      sampling: ``"shared"``: all workers draw the same layers, from a distribution that
        follows the mean of their norms. ``"per_worker"``, as in the paper: each draws
        its own (from the second step on), and a layer is exchanged if any worker drew
        it.
      momentum: :math:`\mu` in [0, 1).
      nesterov: as in ``optax.sgd``.
      seed: of the draws; must be the same on all workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for an argument out of range, and for settings of the exchange other
        than its axis; in ``init``, if ``budget`` or ``p_min`` does not suit the number
        of layers, or ``layers`` the parameters; in ``update``, for an unbound axis, and
        for gradients that were averaged already, if types show it (``shard_map`` with
        ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import Exchange, jointspar
      >>> params = {"a": jnp.ones(2), "b": jnp.ones(2)}
      >>> tx = jointspar.jointspar(0.1, Exchange(), {"a": "a", "b": "b"}, budget=1)
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
    check_static(_STATIC, locals())
    check_range("learning_rate", learning_rate, schedule=True)
    check_range("momentum", momentum, 0.0, 1.0, open_high=True)
    heavy_ball = optax.trace(momentum, nesterov)

    def rule(grads: Any, trace: Any, params: Any, count: jax.Array) -> Any:
        updates, new = heavy_ball.update(grads, optax.TraceState(trace))
        return _descend(updates, _at(learning_rate, count)), new.trace

    return sample_layers(rule, exchange, layers, budget, p_min, horizon, sampling, seed)


def jointspar_lars(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    layers: Layers,
    budget: float,
    *,
    p_min: float | None = None,
    horizon: int = 1000,
    sampling: Sampling = "shared",
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any = True,
    trust_coefficient: ArrayLike = 0.001,
    eps: ArrayLike = 0.0,
    trust_ratio_mask: Any = True,
    momentum: ArrayLike = 0.9,
    nesterov: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""JointSpar-LARS: LARS that computes and communicates only layers drawn.

    As :func:`jointspar`, with the step of LARS for each parameter x of a layer in S:

    .. math::

      u &= \hat g + \lambda x \\
      m &\leftarrow \mu m + lr\, \eta \frac{\|x\|}{\|u\| + \varepsilon}\, u, \quad
      x \leftarrow x - m

    The ratio is 1 where a norm is 0; the norms are those of the mean over the workers.
    With s = D this is ``optax.lars`` of the mean gradient.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: as in :func:`jointspar`.
      layers: as in :func:`jointspar`.
      budget: as in :func:`jointspar`.
      p_min: as in :func:`jointspar`.
      horizon: as in :func:`jointspar`.
      sampling: as in :func:`jointspar`.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      weight_decay_mask: which parameters decay, as in ``optax.lars``.
      trust_coefficient: :math:`\eta`, positive.
      eps: :math:`\varepsilon`, not negative.
      trust_ratio_mask: which parameters have a ratio, as in ``optax.lars``.
      momentum: :math:`\mu` in [0, 1).
      nesterov: as in ``optax.lars``.
      seed: as in :func:`jointspar`.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: as :func:`jointspar`; and in ``update`` without ``params``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import Exchange, jointspar
      >>> params = {"w": jnp.array([3.0, 4.0])}
      >>> tx = jointspar.jointspar_lars(1.0, Exchange(), "all", budget=1)
      >>> updates, _ = tx.update({"w": jnp.array([0.0, 2.0])}, tx.init(params), params)
      >>> print(updates["w"][1].round(4))  # 0.001 of the norm of the parameters
      -0.005

    References:
      You et al., `Large Batch Training of Convolutional Networks
      <https://arxiv.org/abs/1708.03888>`_, 2017.
    """
    check_static((*_STATIC, "weight_decay_mask", "trust_ratio_mask"), locals())
    check_range("learning_rate", learning_rate, schedule=True)
    check_range("weight_decay", weight_decay, 0.0, schedule=True)
    check_range("trust_coefficient", trust_coefficient, 0.0, open_low=True)
    check_range("eps", eps, 0.0)
    check_range("momentum", momentum, 0.0, 1.0, open_high=True)
    if not callable(weight_decay_mask):
        check_bools("weight_decay_mask", weight_decay_mask)
    if not callable(trust_ratio_mask):
        check_bools("trust_ratio_mask", trust_ratio_mask)
    ratio = optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps)
    heavy_ball = optax.trace(momentum, nesterov)

    def rule(grads: Any, trace: Any, params: Any, count: jax.Array) -> Any:
        check_params(params)
        direction = optax.chain(
            optax.add_decayed_weights(_at(weight_decay, count), weight_decay_mask),
            optax.masked(ratio, trust_ratio_mask),
        )
        updates, _ = direction.update(grads, direction.init(params), params)
        updates = _descend(updates, _at(learning_rate, count))
        updates, new = heavy_ball.update(updates, optax.TraceState(trace))
        return updates, new.trace

    return sample_layers(rule, exchange, layers, budget, p_min, horizon, sampling, seed)


def _at(value: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    return value(count) if callable(value) else value


def _descend(updates: optax.Updates, rate: Any) -> optax.Updates:
    """Minus the rate times the updates, in their dtypes."""
    return jax.tree.map(lambda u: jnp.asarray(-rate, u.dtype) * u, updates)
