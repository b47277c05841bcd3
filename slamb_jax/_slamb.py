"""SLAMB, as a chain of links."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from slamb_jax._average import average_parameters_every
from slamb_jax._axes import AxisName
from slamb_jax._checks import check_integer, check_range, check_static
from slamb_jax._fused import scale_by_slamb
from slamb_jax._quantize import Payload, check_payload
from slamb_jax._selections import Selection, make_selection
from slamb_jax._shards import on_shards

STATIC_ARGS = (
    "axis_name",
    "local_axis_name",
    "compress_ratio",
    "mask",
    "sync_every",
    "form",
    "selection",
    "min_size",
    "bias_correction",
    "mu_dtype",
    "payload",
    "average_payload",
    "overlap",
    "nu_of",
    "nu_dtype",
    "param_specs",
    "stacked",
    "seed",
)
"""Arguments of :func:`slamb` that cannot be traced: what to pass as ``static_args``
to ``optax.inject_hyperparams``."""


def slamb(
    learning_rate: optax.ScalarOrSchedule,
    *,
    axis_name: AxisName | None = None,
    local_axis_name: AxisName | None = None,
    compress_ratio: float | Mapping[int, float] = 0.1,
    b1: Any = 0.9,
    b2: Any = 0.999,
    b3: Any = 0.7,
    eps: Any = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    sync_every: int | None = 100,
    form: str = "sum",
    selection: str | Selection = "strided",
    c_min: Any = 0.01,
    c_max: Any = 1000.0,
    min_size: int = 9000,
    bias_correction: bool = True,
    mu_dtype: Any = None,
    payload: Payload = None,
    average_payload: Payload = None,
    overlap: bool = False,
    nu_of: str = "gradient",
    nu_dtype: Any = None,
    param_specs: Any = None,
    stacked: Any = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""SLAMB: LAMB that exchanges a tenth of its momentum per step.

    n workers, each with its own parameters p, moments m and v, and its own gradient
    g, which is **not** averaged. At step :math:`t = 1, 2, \ldots`, with
    :math:`M_t` the share k of the coordinates whose turn it is:

    .. math::

      m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad
      v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      m[M_t] &\leftarrow \text{mean over workers of } m[M_t] \\
      \tau &\leftarrow 0 \text{ on } M_t,\ \tau + 1 \text{ elsewhere}, \quad
      r = \beta_3^\tau \\
      u_0 &= \frac{m}{\sqrt v + \varepsilon}
        \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}, \quad u = u_0 + \lambda p \\
      \phi_{hi} &= \operatorname{clip}(\|p[M_t]\| / \|u_0[M_t]\|, c_{min}, c_{max}),
      \quad \phi_{lo} = \min(\|p[\neg M_t]\| / \|u_0[\neg M_t]\|, c_{max}) \\
      p &\leftarrow p - lr\,\left(\phi_{hi}\,r
        + \phi_{lo}\,\frac{1-r}{\sqrt n}\right) u \\
      p &\leftarrow \text{mean over workers of } p
      \quad\text{at } t = 1, H + 1, 2H + 1, \ldots

    That is ``form="sum"``, the authors' "optimized implementation". ``form="product"``
    is their other published rule, with :math:`u` as in Adam plus decay inside the
    norms and the step :math:`lr\,(r + (1-r)/\sqrt n)\,\phi\,u` with
    :math:`\phi = \operatorname{clip}(r\phi_{hi} + (1-r)\phi_{lo}, c_{min}, c_{max})`;
    see :func:`layerwise_trust_ratio`. Leaves of one dimension or fewer, and those
    with fewer than ``min_size`` elements, are exchanged whole.

    Each worker must hold its own copy of the parameters and of this state, and must
    pass its own gradient: :func:`replicate` and :func:`per_worker_step` arrange that.

    Departures from the paper: the default choice of :math:`M_t` is computed instead of
    stored (:class:`Strided`); ``sync_every=1`` averages at every step, where the
    authors' never does; k is 1/c with ``c = round(1/k)`` for round robins.

    Args:
      learning_rate: a number, or a schedule of the step from 0. The large-batch rate:
        the one that suits n workers' batches together.
      axis_name: the mesh axis (or a tuple of axes) over which the workers exchange,
        bound by ``shard_map``, ``pmap`` or ``vmap``. None: a single worker, with
        masks and ages as for n = 1 and nothing exchanged.
      local_axis_name: the mesh axis (or axes) within a group of devices with fast
        links between them, if each worker is such a group. Its devices' gradients are
        averaged densely over it, n is the number of groups, and parameters and state
        are the same within a group; of what travels between the groups each device
        exchanges a share. See :func:`per_worker_step`.
      compress_ratio: k in (0, 1], the share of the coordinates exchanged per step; or
        a mapping from the step (from 0) at which a ratio begins to the ratio, such as
        ``{0: 0.5, 500: 0.2, 1000: 0.1}``: compression warm-up, see :class:`Piecewise`.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      b3: decay rate of the freshness, in [0, 1]. The one to tune; the paper's, 0.93 to
        0.999, are in :mod:`slamb_jax.recipes`.
      eps: added to the root of the second moment, positive.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.adamw``. None: all.
      sync_every: H, the steps from one average of the parameters to the next; None
        for never.
      form: ``"sum"`` or ``"product"``.
      selection: ``"strided"``, ``"permutation"``, ``"bernoulli"``, ``"top_k"``, or any
        object with the methods of :class:`Selection`, which then has a ratio, a
        smallest size and a seed of its own: ``compress_ratio``, ``min_size`` and
        ``seed`` here are for the named ones.
      c_min: lower bound of the trust ratio, not negative.
      c_max: upper bound of the trust ratio, at least ``c_min``; may be infinite.
      min_size: leaves with fewer elements are exchanged whole. Choose it for the
        model: the default suits BERT, not a small ResNet.
      bias_correction: False, in the product form only, leaves it out.
      mu_dtype: dtype of m, and so of what travels every step: None for float32, or
        bfloat16 or float16.
      nu_of: what v is the second moment of: ``"gradient"``, the worker's own, or
        ``"momentum"``, :math:`v \leftarrow \beta_2 v + (1-\beta_2) m^2` with m after
        its exchange, on which the workers agree far better. A departure from the paper
        that costs nothing and closes much of the gap to dense training in short or
        noisy runs, and with codes of few bits. ``"larger"``, of the larger of the two,
        another: it bounds the step where a worker's own gradient is 0 and the mean
        momentum is not, as under ReLUs or of an embedding's rows, at which
        ``"gradient"`` can stall or diverge. See :func:`mask_momentum`.
      nu_dtype: dtype of v, which never travels: None for float32, or bfloat16, to which
        it is rounded at random (:func:`mask_momentum`).
      payload: what travels of m, if not its dtype: ``"bfloat16"``, ``"float16"``, or
        the codes of :class:`StochasticUniform` or :class:`NaturalCompression`, which
        are right on average. With the quantizer's ``error_feedback`` each worker keeps
        what rounding took, of its own momentum and of the means that it rounded for
        all, in one more float32 copy of the parameters, and sends it with the next
        exchange of the coordinate: on in :data:`slamb_jax.recipes.LARGE_BATCH`.
      average_payload: what travels of the parameters every H steps, likewise, as the
        difference to the last average: see :func:`average_parameters_every`. It needs
        one more copy of the parameters.
      overlap: exchange at each step what the last one left, so that the exchange does
        not wait for the gradient and can run behind the forward and backward pass, see
        :func:`mask_momentum`; the average of parameters is exchanged as ever.
      param_specs: for a model that does not fit on one device: a tree of
        ``jax.sharding.PartitionSpec`` with the structure of the parameters, or a prefix
        of it, with the mesh axes, other than the workers', over which each leaf is cut
        (None: not). Masks and exchange are those of each shard by itself, norms of the
        whole layer. The axes may be manual (``jax.shard_map``) or left to the compiler
        (:func:`per_worker_step` with ``param_specs``): see :func:`on_shards`.
      stacked: which leaves are stacks of layers along their first dimension, as of a
        model whose layers are scanned: a tree of bools, a prefix of it or a function of
        the parameters, as for ``mask``. Each layer then has trust ratios of its own,
        and is what counts as one-dimensional or small. None: no leaf.
      seed: changes the coordinates' turns; must be the same on all workers.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` that computes what a chain of
      :func:`mask_momentum`, :func:`layerwise_trust_ratio`,
      :func:`elementwise_rescale`, ``optax.scale_by_learning_rate`` and
      :func:`average_parameters_every` does, in fewer passes over memory, and has the
      chain's state: m, v and counts.

    Raises:
      ValueError: for an argument out of range; in ``update``, without ``params``, for
        an unbound axis, and for gradients that were averaged already where the types
        show it (``shard_map`` with ``check_vma=True``).

    .. warning::
      Do not wrap it in ``optax.apply_if_finite``, ``optax.conditionally_transform``
      or ``optax.MultiSteps(should_skip_update_fn=...)``: when one worker skips and
      another does not, the exchange waits for ever. To skip poisoned gradients use
      :func:`skip_not_finite`, to accumulate gradients :func:`accumulate`. Under
      ``optax.inject_hyperparams`` pass ``static_args=slamb_jax.STATIC_ARGS`` and, with
      16-bit parameters, ``hyperparam_dtype=jnp.float32``: in bfloat16 0.999 is 1.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> rate = optax.linear_schedule(0.1, 0.0, 100)
      >>> tx = slamb_jax.slamb(rate, axis_name="data", min_size=0, sync_every=10)
      >>> def train(params, target):  # what one worker does, with data of its own
      ...     def step(carry, _):
      ...         params, state = carry
      ...         grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...         updates, state = tx.update(grads, state, params)
      ...         return (optax.apply_updates(params, updates), state), None
      ...     carry = (params, tx.init(params))
      ...     return jax.lax.scan(step, carry, length=101)[0][0]
      >>> targets = jnp.array([1.0, 2.0, 3.0, 6.0])
      >>> params = jax.vmap(train, axis_name="data")(jnp.ones((4, 5, 3)), targets)
      >>> print(params.mean((1, 2)).round())  # near the mean of the targets
      [3. 3. 3. 3.]

    References:
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023.
    """
    check_static(STATIC_ARGS, locals())
    check_range("learning_rate", learning_rate, schedule=True)
    check_integer("min_size", min_size, 0)
    if isinstance(learning_rate, jax.Array):  # a schedule's value takes u's dtype
        learning_rate = _constant(learning_rate)
    scaled = scale_by_slamb(
        make_selection(selection, compress_ratio, min_size, seed),
        axis_name=axis_name,
        local_axis_name=local_axis_name,
        payload=payload,
        b1=b1,
        b2=b2,
        b3=b3,
        eps=eps,
        weight_decay=weight_decay,
        mask=mask,
        form=form,
        c_min=c_min,
        c_max=c_max,
        bias_correction=bias_correction,
        mu_dtype=mu_dtype,
        overlap=overlap,
        nu_of=nu_of,
        nu_dtype=nu_dtype,
        param_specs=param_specs,
        stacked=stacked,
    )
    tx = _then(
        scaled,
        optax.scale_by_learning_rate(learning_rate),
        average_parameters_every(
            sync_every,
            axis_name,
            local_axis_name=local_axis_name,
            payload=check_payload("average_payload", average_payload),
        ),
    )
    return tx if param_specs is None else on_shards(tx, param_specs)


def _then(
    first: optax.GradientTransformationExtraArgs,
    *rest: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """A chain whose first member has the state of several links."""
    after = optax.chain(*rest)

    def init(params: optax.Params) -> optax.OptState:
        return (*first.init(params), *after.init(params))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        before = len(state) - len(rest)
        updates, fused = first.update(updates, state[:before], params, **extra_args)
        updates, others = after.update(updates, state[before:], params, **extra_args)
        return updates, (*fused, *others)

    return optax.GradientTransformationExtraArgs(init, update)


def _constant(value: jax.Array) -> optax.Schedule:
    return lambda count: value
