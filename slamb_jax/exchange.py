"""The settings of an exchange: between whom, what, how much, and how often."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chex
import optax

from slamb_jax._axes import AxisName
from slamb_jax._ex.budget import FORMATS, check_share, share_of
from slamb_jax._ex.checks import check_ratios, check_settings
from slamb_jax._ex.json_form import from_json, to_json
from slamb_jax._ex.payloads import (
    Payload,
    Quantizer,
    resolve_payload,
)
from slamb_jax._ex.selections import (
    BY_NAME,
    Schedule,
    Selection,
    Strided,
)
from slamb_jax._layout import Layout
from slamb_jax._leaves import Leaf

_LARGEST_MIN_SIZE = 9000  # the authors' grad_size_thr
_DENSE_SHARE = 0.01  # of all parameters: the most that small matrices may hold
_PAPER: dict[str, Any] = {  # for BERT-Large, phase 1, at a rate of 6e-3
    "compress_ratio": 0.1,
    "payload": None,
    "b3": 0.93,
    "sync_every": 100,
    "rolling": False,
    "average_payload": None,
    "average_b2": None,
}


@dataclasses.dataclass(frozen=True, repr=False)
class Exchange:
    r"""What the workers exchange: between whom, how much, in what, and how often.

    Optimizers, links, :func:`replicate`, :func:`per_worker_step` and :func:`advise`
    take it: make one, and give it to all. It is immutable, hashable and printable.

    By default the workers agree at every step on the mean of their momenta, in 1.7
    bits: 0.052 of the bytes of averaging gradients in float32. Then all take the same
    step; see :func:`average_momentum`.

    With ``sync_every=H`` above 1, an ``outer`` optimizer or a ``compress_ratio``
    workers step by themselves instead, and their parameters are averaged; see
    :func:`average_parameters_every`. ``sync_every=H`` averages each parameter once in H
    steps, and divides the bytes by H; ``for_budget`` chooses it. ``paper`` has SLAMB's
    published settings. Workers that step by themselves should draw from the same data.

    Args:
      axis_name: the mesh axis (or a tuple of axes) of the workers, bound by
        ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``. None: a single worker, with
        masks and ages as for n = 1 and nothing exchanged.
      local_axis_name: the mesh axis (or axes) of the devices of a worker that is a
        group of them, with fast links between. Gradients are averaged densely over it,
        n is the number of groups, and each device exchanges a slice of what its group
        sends. None: a worker is one device.
      compress_ratio: k in [0, 1], the share of the momentum's coordinates exchanged
        per step, 0 for none; or a mapping from the step (from 0) at which a ratio
        begins to the ratio, such as ``{0: 0.5, 500: 0.1}``. None: 0, or the ratio of
        the ``selection``.
      min_size: matrices with fewer elements are exchanged densely, at every step, as
        leaves of one dimension or fewer always are. None: 9000, the authors', or less
        where matrices that small would hold more than 1 % of the parameters.
      selection: ``"strided"``, ``"permutation"``, ``"bernoulli"``, or a
        :class:`slamb_jax.selections.Selection`, which has a ratio, a smallest size and
        a seed of its own: to give one of them here too is an error.
      seed: changes which coordinates are exchanged when; the same on all workers.
        None: 0.
      payload: the wire format of the momentum: ``"bfloat16"``, ``"uniform8"``,
        ``"uniform4"``, ``"ternary"``, ``"largest_of_7"`` (of 31, of 127), or a
        quantizer such as :class:`slamb_jax.payloads.StochasticUniform`.
        None: the momentum's dtype.
      b3: decay rate of a coordinate's freshness per step since it was exchanged, in
        [0, 1]: stale coordinates step at a smaller rate; see
        :func:`elementwise_rescale`.
      overlap: exchange at each step what the last one left, so that the exchange can
        run during the forward and backward pass; see :func:`average_momentum`,
        :func:`mask_momentum` and :func:`average_parameters_every`.
      sync_every: H, the steps from one average of a coordinate to the next, a positive
        integer. 1: of the momentum, before all workers step alike. Above 1: of the
        parameters. None: never.
      rolling: average a 1/H share of the parameters at every step, each coordinate
        once in H steps, instead of all of them every H steps. None: unless there is
        an ``outer`` optimizer.
      average_payload: the wire format of the average, likewise. Of parameters it is
        that of the difference to the last average, of which a copy is kept; see
        :func:`average_parameters_every`. None: float32 for the momentum, the
        parameters' dtype for parameters.
      average_b2: decay rate of the second moment of what was averaged in codes, in
        [0, 1). Its root is the unit of the momentum's codes, for optimizers that have
        no second moment of their own; a mean of parameters is divided by it. None: no
        second moment; see :func:`average_momentum` and
        :func:`average_parameters_every`.
      outer: an optax transformation that steps from one average to the next, with the
        difference between them as its gradient, such as
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. None: the average itself.
      param_specs: for a model that does not fit on one device: a tree like the
        parameters, or a prefix of it, of ``jax.sharding.PartitionSpec`` with the mesh
        axes, other than the workers', over which each leaf is sharded (None: not).
        Each shard is exchanged by itself; norms are those of the whole layer. The axes
        may be manual (``jax.shard_map``) or left to the compiler
        (:func:`per_worker_step`).
      stacked: which leaves are stacks of layers along their first dimension, as of a
        model whose layers are scanned: a tree of bools, a prefix of it, or a function
        of the parameters. Each layer then has its own trust ratios, and is what counts
        as one-dimensional or small. None: no leaf.

    Raises:
      ValueError: for a value out of range, and for settings that cannot go together.

    Examples:
      >>> import slamb_jax
      >>> exchange = slamb_jax.Exchange(
      ...     "data", sync_every=4, average_payload="uniform8"
      ... )
      >>> exchange
      Exchange('data', sync_every=4, average_payload='uniform8')
      >>> slamb_jax.Exchange.from_json(exchange.to_json()) == exchange
      True
    """

    axis_name: AxisName | None = None
    _: dataclasses.KW_ONLY
    local_axis_name: AxisName | None = None
    # Mappings and trees are compared, and have no hash.
    compress_ratio: float | Mapping[int, float] | None = dataclasses.field(
        default=None, hash=False
    )
    min_size: int | None = None
    selection: str | Selection = "strided"
    seed: int | None = None
    payload: Payload = None
    b3: float = 1.0
    overlap: bool = False
    sync_every: int | None = 1
    rolling: bool | None = None
    average_payload: Payload = "ternary"
    average_b2: float | None = 0.98
    outer: optax.GradientTransformation | None = None
    param_specs: Any = dataclasses.field(default=None, hash=False)
    stacked: Any = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.compress_ratio, Mapping):
            check_ratios(self.compress_ratio)
            ratios = dict(sorted(self.compress_ratio.items()))
            object.__setattr__(self, "compress_ratio", ratios)
        check_settings(self)

    @functools.cached_property
    def layout(self) -> Layout | None:
        """How leaves are sharded and stacked; None if none is."""
        if self.param_specs is None and self.stacked is None:
            return None
        return Layout(self.param_specs, self.stacked)

    @property
    def exchanges_momentum(self) -> bool:
        """Whether anything of the momentum is exchanged."""
        if self.compress_ratio is None:
            return not isinstance(self.selection, str)
        return self.compress_ratio != 0

    @property
    def averages_momentum(self) -> bool:
        """Whether all of the momentum is averaged at every step, before the direction.

        Otherwise workers step by themselves, and their parameters are averaged.
        """
        every_step = self.sync_every == 1 and self.outer is None
        return every_step and not self.exchanges_momentum

    @property
    def in_turn(self) -> bool:
        """Whether a part of the parameters is averaged at every step."""
        if self.sync_every is None or self.sync_every == 1:
            return False
        return self.outer is None if self.rolling is None else self.rolling

    @property
    def averages_in_codes(self) -> bool:
        """Whether parameters are averaged as differences, in an ``average_payload``."""
        given = self.sync_every is not None and self.average_payload is not None
        return given and self.axis_name is not None

    @property
    def keeps_anchor(self) -> bool:
        """Whether all workers keep the last average of the parameters."""
        if self.sync_every is None or self.outer is not None:
            return self.sync_every is not None
        differ = self.sync_every > 1 or self.overlap or self.keeps_average_error
        return self.averages_in_codes and differ

    @property
    def normalizes(self) -> bool:
        """Whether the mean difference is divided by the root of its second moment."""
        asked = self.average_b2 is not None and self.outer is None
        return self.averages_in_codes and asked

    @property
    def averages_per_step(self) -> float:
        """How often parameters, all or some, are averaged: each step, or every H."""
        if self.sync_every is None:
            return 0.0
        return 1.0 if self.in_turn else 1 / self.sync_every

    def averages_at(self, step: Any) -> Any:
        """Whether parameters, all or some, are averaged at a step, counted from 1."""
        if self.sync_every is None or self.in_turn or self.sync_every == 1:
            return self.sync_every is not None
        phase = 1 if self.outer is None else 0
        return step % self.sync_every == phase % self.sync_every

    @functools.cached_property
    def keeps_rounding_error(self) -> bool:
        """Whether a worker keeps what rounding its payload took, to send it later."""
        return self.exchanges_momentum and _has_feedback(self.payload)

    @functools.cached_property
    def keeps_average_error(self) -> bool:
        """Whether a worker keeps what rounding took of its parameters' difference."""
        return self.averages_in_codes and _has_feedback(self.average_payload)

    def selection_for(self, leaves: Sequence[Leaf]) -> Selection:
        """The selection, with the ``min_size`` that suits all these leaves."""
        if not isinstance(self.selection, str):
            return self.selection
        make = functools.partial(self._select, BY_NAME[self.selection], leaves)
        if isinstance(self.compress_ratio, Mapping):
            return Schedule({t: make(k) for t, k in self.compress_ratio.items()})
        return make(self.compress_ratio or 1.0)  # without an exchange none is stale

    def average_selection(self, leaves: Sequence[Leaf]) -> Selection:
        """Which parameters are averaged at a step, where they are ``in_turn``."""
        assert self.sync_every is not None
        return self._select(Strided, leaves, 1 / self.sync_every)

    def _select(
        self, kind: Callable[..., Selection], leaves: Sequence[Leaf], ratio: float
    ) -> Selection:
        min_size = _min_size_for(leaves) if self.min_size is None else self.min_size
        return kind(ratio, min_size, 0 if self.seed is None else self.seed)

    @classmethod
    def paper(cls, axis_name: AxisName | None = None, **settings: Any) -> "Exchange":
        r"""The settings that the SLAMB paper publishes, in float32; others override.

        A tenth of the momentum per step, all parameters every 100 steps,
        :math:`\beta_3` 0.93: 0.11 of the dense bytes. The paper's are for BERT-Large;
        tune ``b3`` together with the rate.

        Examples:
          >>> import slamb_jax
          >>> tx = slamb_jax.slamb(6e-3, slamb_jax.Exchange.paper("data"))

        References:
          Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML
          2023, section 5 and the recorded runs.
        """
        return cls(axis_name, **_PAPER | settings)

    @classmethod
    def for_budget(
        cls,
        axis_name: AxisName | None,
        share: float,
        params: chex.ArrayTree,
        **settings: Any,
    ) -> "Exchange":
        """The default settings in the wire format that keeps to a share of the bytes.

        The ``average_payload`` is ``"ternary"``, ``"largest_of_7"``,
        ``"largest_of_31"`` or ``"largest_of_127"``: the first that is small enough.
        The losses that were recorded are in ``benchmarks/results/frontier.md``;
        ``slamb-jax advise --budget 5%`` prints what to expect.

        Args:
          axis_name: the mesh axis of the workers.
          share: the most bytes, of a mean of float32 gradients; in (0, 1].
          params: the parameters, or their shapes and dtypes.
          settings: others of the exchange, such as ``local_axis_name``.

        Raises:
          ValueError: if none is small enough. An ``outer`` optimizer sends less.

        Examples:
          >>> import jax, jax.numpy as jnp, slamb_jax
          >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
          >>> exchange = slamb_jax.Exchange.for_budget("data", 0.02, params)
          >>> exchange.average_payload, round(exchange.share(params), 3)
          ('largest_of_7', 0.018)
        """
        check_share(share)
        for payload in FORMATS:
            exchange = cls(axis_name, **{"average_payload": payload} | settings)
            if (least := exchange.share(params)) <= share:
                return exchange
        raise ValueError(
            f"share must be at least {least:.2g} for these parameters, got {share!r}: "
            "give an outer optimizer and a sync_every of 30, say, to send less"
        )

    def share(self, params: chex.ArrayTree) -> float:
        """Bytes of a step over those of averaging gradients in float32.

        Those of averages of the parameters are spread over the steps between them.
        ``params`` are the parameters, or their shapes and dtypes.
        """
        return share_of(self, params)

    def to_json(self) -> dict[str, Any]:
        """The settings that are not the default, as what JSON and YAML can hold.

        Raises:
          ValueError: for functions and objects of the user's own.
        """
        return to_json(self._given())

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> "Exchange":
        """What :meth:`to_json` wrote.

        Raises:
          ValueError: for a setting that there is not, or out of range.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        return cls(**from_json(settings, known))

    def _given(self) -> dict[str, Any]:
        """The settings that are not the default."""
        given = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            plain = isinstance(value, str | int | float)  # others may be trees
            if value is not field.default and not (plain and value == field.default):
                given[field.name] = value
        return given

    def __repr__(self) -> str:
        given = self._given()
        shown = [repr(given.pop("axis_name"))] if "axis_name" in given else []
        shown += [f"{name}={value!r}" for name, value in given.items()]
        return f"Exchange({', '.join(shown)})"


def check_exchange(exchange: object) -> Exchange:
    """Raises unless it is an :class:`Exchange`."""
    if isinstance(exchange, Exchange):
        return exchange
    way_out = f": slamb_jax.Exchange({exchange!r})" if isinstance(exchange, str) else ""
    raise ValueError(
        f"exchange must be a slamb_jax.Exchange, got {exchange!r}{way_out}"
    )


def _has_feedback(payload: Payload) -> bool:
    resolved = resolve_payload(payload)
    return isinstance(resolved, Quantizer) and resolved.error_feedback


def _min_size_for(leaves: Sequence[Leaf]) -> int:
    """The size below which matrices together hold at most 1 % of the parameters."""
    matrices = sorted(
        (x.layer_size, x.layer_size * x.layers)
        for x in leaves
        if len(x.layer_shape) > 1
    )
    room = _DENSE_SHARE * sum(x.layer_size * x.layers for x in leaves)
    for size, elements in matrices:
        room -= elements
        if room < 0:
            return min(size, _LARGEST_MIN_SIZE)
    return _LARGEST_MIN_SIZE
