"""What the workers exchange: between whom, in what wire format, and how often."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import chex
import optax

from slamb_jax._core import checks as _checks
from slamb_jax._core.axes import AxisName, as_tuple
from slamb_jax._core.layout import layout_of, mesh_axes
from slamb_jax._core.leaves import LayoutOf
from slamb_jax.exchange import nbytes as _nbytes
from slamb_jax.exchange.codecs import CODECS
from slamb_jax.exchange.selections import Selection, Strided

_FEW_BITS: Any = {"payload": "ternary", "sync_every": 15, "selection": Strided(1.0)}
_PAPER = {"payload": None, "sync_every": 100, "selection": Strided(0.1)}


@dataclasses.dataclass(frozen=True, repr=False)
class Exchange:
    r"""What the workers exchange: between whom, in what wire format, and how often.

    Optimizers, links, :func:`replicate`, :func:`per_worker_step` and :func:`advise`
    take it: make one, and give it to all. It is immutable, hashable and printable.

    By default the workers agree at every step on the mean of their momenta, in 1.7
    bits: 0.052 of the bytes of averaging gradients in float32, 0.103 of those in
    bfloat16. Then all take the same step, whichever worker sees which data; see
    :func:`mask_momentum`. Most users set ``axis_name`` and ``payload`` alone.

    In two other kinds of exchange workers step by themselves, and should draw from the
    same data. With an ``outer`` optimizer they average the difference of their
    parameters every H steps, as in DiLoCo; see :func:`average_parameters_every`. With a
    ``selection`` they exchange a share of the momentum at each step, as in SLAMB; see
    :func:`slamb` and :meth:`paper`.

    Args:
      axis_name: the mesh axis (or a tuple of axes) of the workers, bound by
        ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap``. None: a single worker.
      payload: the wire format of the mean. ``"ternary"``: three values, 1.7 bits a
        coordinate. ``"largest_of_7"``, or of another number from 2 to 127: the sign of
        the largest coordinate of so many, in half a byte up to 7 and a byte above.
        ``"uniform8"``, ``"uniform4"``: stochastic rounding to 8 or 4 bits, as in QSGD.
        ``"sign"``: signs and a scale, 1 bit. ``"bfloat16"``. None: float32; the
        parameters' dtype where parameters are averaged, and the momentum's under a
        ``selection``.
      sync_every: H, the steps from one mean to the next, a positive integer. 1: of the
        momentum, before all workers step alike. Above 1: of the parameters, which needs
        an ``outer`` optimizer or ``payload=None``. None: never, for a ``selection``.
      outer: an optax transformation that steps from one average of the parameters to
        the next, with the difference between them as its gradient, such as
        ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      selection: which coordinates of the momentum are exchanged at a step, such as
        :class:`slamb_jax.selections.Strided`; for :func:`slamb`.
      local_axis_name: the mesh axis (or axes) of the devices of a worker that is a
        group of them, with fast links between. Gradients are averaged densely over it,
        n is the number of groups, and each device exchanges a slice of what its group
        sends. None: a worker is one device.
      route: how codes and 16 bits come to all workers. ``"owners"``: each worker
        averages a slice, and sends its mean to all others at once, so that an exchange
        waits for two messages, however many workers there are. ``"all"``: each sends
        all of its own to all others, and averages for itself: one message, of n / 2
        times the bytes; for a few workers whose messages take long. Two workers take
        one message.
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
      >>> exchange = slamb_jax.Exchange("data", payload="uniform8")
      >>> exchange
      Exchange('data', payload='uniform8')
      >>> slamb_jax.Exchange.from_json(exchange.to_json()) == exchange
      True
    """

    axis_name: AxisName | None = None
    _: dataclasses.KW_ONLY
    payload: str | None = "ternary"
    sync_every: int | None = 1
    outer: optax.GradientTransformation | None = None
    selection: Selection | None = None
    local_axis_name: AxisName | None = None
    route: str = "owners"
    # Trees are compared, and have no hash: exchanges that differ in these alone have
    # the same one, as equal hashes may.
    param_specs: Any = dataclasses.field(default=None, hash=False)
    stacked: Any = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        _check_settings(self)

    @functools.cached_property
    def layout(self) -> LayoutOf | None:
        """How leaves are sharded and stacked, of parameters; None if none is."""
        if self.param_specs is None and self.stacked is None:
            return None
        return layout_of(self.param_specs, self.stacked)

    @functools.cached_property
    def shard_axes(self) -> tuple[Hashable, ...]:
        """The mesh axes over which parameters are sharded, sorted."""
        return () if self.param_specs is None else mesh_axes(self.param_specs)

    @property
    def averages_momentum(self) -> bool:
        """Whether all of the momentum is averaged at every step, before the direction.

        Otherwise workers step by themselves, and their parameters are averaged.
        """
        return self.sync_every == 1 and self.outer is None and self.selection is None

    @property
    def rounds_momentum(self) -> bool:
        """Whether the mean of all of the momentum is rounded on its way."""
        rounds = self.payload is not None and self.axis_name is not None
        return rounds and self.averages_momentum

    def averages_at(self, step: Any) -> Any:
        """Whether there is a mean of all coordinates at a step, counted from 1."""
        if self.sync_every is None or self.sync_every == 1:
            return self.sync_every is not None
        # SLAMB's authors average at steps 1, H + 1 and so on. An outer optimizer steps
        # from the parameters that all began with, and has nothing to do at step 1.
        phase = 1 if self.outer is None else 0
        return step % self.sync_every == phase % self.sync_every

    @classmethod
    def paper(cls, axis_name: AxisName | None = None, **settings: Any) -> "Exchange":
        r"""The settings that the SLAMB paper publishes, in float32; others override.

        A tenth of the momentum per step, all parameters every 100 steps: 0.11 of the
        bytes of dense float32, 0.22 of bfloat16. The paper's settings are for
        BERT-Large.

        Examples:
          >>> import slamb_jax
          >>> tx = slamb_jax.slamb(6e-3, slamb_jax.Exchange.paper("data"))

        References:
          Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML
          2023, section 5 and the recorded runs.
        """
        return cls(axis_name, **_PAPER | settings)

    @classmethod
    def few_bits(cls, axis_name: AxisName | None = None, **settings: Any) -> "Exchange":
        r"""Settings for SLAMB that spend the paper's bytes on bits; others override.

        All of the momentum per step in three values, all parameters every 15 steps in
        float32: 0.12 of the bytes of dense float32, for 0.11 of :meth:`paper`. In
        ``benchmarks.train --grid slamb_gap`` the loss was 0.1 to 0.6 % above dense
        LAMB's with 8 workers and 2.8 % with 16, the means of three seeds but for one
        long run; that of the paper's settings 8 to 15 %.

        Examples:
          >>> import slamb_jax
          >>> tx = slamb_jax.slamb(6e-3, slamb_jax.Exchange.few_bits("data"))
        """
        return cls(axis_name, **_FEW_BITS | settings)

    def share(self, params: chex.ArrayTree) -> float:
        """Bytes of a step over those of averaging gradients in float32.

        Over those in bfloat16 it is twice as much. The bytes of averages of the
        parameters are spread over the steps between them. By the route ``"all"`` n
        workers send n / 2 times as much. ``params`` are the parameters, or their shapes
        and dtypes.
        """
        return _nbytes.share(*_nbytes.means_of(self, params))

    def to_json(self) -> dict[str, Any]:
        """The settings that are not the default, as what JSON and YAML can hold.

        Raises:
          ValueError: for ``outer``, ``param_specs`` or ``stacked``, and for a
            ``selection`` other than :class:`Strided`, which no file can hold.
        """
        settings = self._given()
        if isinstance(self.selection, Strided):
            settings["selection"] = dataclasses.asdict(self.selection)
        for name, x in settings.items():
            of_program = name in ("outer", "param_specs", "stacked")
            if of_program or isinstance(x, Selection):
                raise ValueError(
                    f"{name} cannot be written as JSON, got {x!r}: write the Exchange "
                    f"without it, and add it by dataclasses.replace(exchange, {name}=)"
                )
        return settings

    @classmethod
    def from_json(cls, settings: Mapping[str, Any]) -> "Exchange":
        """What :meth:`to_json` wrote.

        Raises:
          ValueError: for a setting that there is not, or out of range.
        """
        if not isinstance(settings, Mapping):
            raise ValueError(f"settings must be a mapping, got {settings!r}")
        given: dict[str, Any] = {  # JSON has no tuples of axes
            name: tuple(x) if isinstance(x, list) else x for name, x in settings.items()
        }
        try:
            if isinstance(given.get("selection"), Mapping):
                given["selection"] = Strided(**given["selection"])
            return cls(**given)
        except TypeError as error:
            raise ValueError(f"{settings} do not fit: {error}") from error

    def _given(self) -> dict[str, Any]:
        """The settings that are not the default."""
        given = {}
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            # Only names and numbers are compared: others may be trees.
            is_equal = isinstance(value, str | int) and value == default
            if not is_equal and value is not default:
                given[field.name] = value
        return given

    def __repr__(self) -> str:
        given = self._given()
        shown = [repr(given.pop("axis_name"))] if "axis_name" in given else []
        shown += [f"{name}={value!r}" for name, value in given.items()]
        return f"Exchange({', '.join(shown)})"


def _check_settings(exchange: Exchange) -> None:
    """Raises for a value out of range, and for settings that cannot go together."""
    payload, selection = exchange.payload, exchange.selection
    # 1. Each setting by itself.
    _checks.check_choice("route", exchange.route, ("owners", "all"))
    is_name = isinstance(payload, str) and payload in ("bfloat16", *CODECS)
    one_of = "None, bfloat16, uniform8, uniform4, ternary, sign or largest_of_2 to _127"
    _checks.check_value(payload is None or is_name, "payload", one_of, payload)
    if exchange.sync_every is not None:
        _checks.check_integer("sync_every", exchange.sync_every, 1)
    if exchange.outer is not None:
        _checks.check_transformation("outer", exchange.outer)
    is_one = selection is None or isinstance(selection, Selection)
    what = "None or a slamb_jax.selections.Selection, such as Strided(0.1)"
    _checks.check_value(is_one, "selection", what, selection)
    # 2. What cannot go together.
    if selection is not None and exchange.outer is not None:
        raise ValueError(f"outer must be None with a selection, got {exchange!r}")
    _check_average(exchange)
    _check_axes(exchange)


def _check_average(exchange: Exchange) -> None:
    payload, every, outer = exchange.payload, exchange.sync_every, exchange.outer
    selects = exchange.selection is not None
    if every is None and not selects and exchange.axis_name is not None:
        raise ValueError(
            f"sync_every=None without a selection sends nothing, got {exchange!r}"
        )
    # An outer step is taken along the mean of the parameters' differences. They are of
    # many steps, and a code of few bits loses what no residual brings back.
    if outer is not None and every is None:
        raise ValueError("outer needs an average: give sync_every too, got None")
    if outer is not None and str(payload).startswith("largest_of_"):
        raise ValueError(
            f"payload={payload!r} would lose most of the difference that an outer "
            "optimizer gets: take 'ternary', 'uniform4' or 'uniform8'"
        )
    # Without one, parameters themselves are averaged; a selection's are in float32.
    if outer is None and every not in (None, 1) and payload is not None and not selects:
        raise ValueError(
            f"sync_every={every} averages parameters, which payload={payload!r} would "
            "round: give payload=None, or outer=optax.sgd(1.0), whose steps it rounds"
        )


def _check_axes(exchange: Exchange) -> None:
    _checks.check_axis_name(exchange.axis_name)
    _checks.check_axis_name(exchange.local_axis_name, "local_axis_name")
    # Between workers, within a worker, and between its shards are other axes each.
    names = exchange.axis_name, exchange.local_axis_name
    between, within = (set(as_tuple(name)) for name in names)
    if within and (not between or between & within):
        raise ValueError(
            f"local_axis_name must name other axes than axis_name, got {exchange!r}"
        )
    if exchange.layout is None:  # which checks param_specs and stacked
        return
    if shared := between & set(exchange.shard_axes):
        raise ValueError(
            f"param_specs must not name the axis of the workers, got {[*shared]}"
        )


def check_exchange(exchange: object) -> Exchange:
    """Raises unless it is an :class:`Exchange`."""
    if isinstance(exchange, Exchange):
        return exchange
    way_out = ""
    if isinstance(exchange, str):
        way_out = f": slamb_jax.Exchange({exchange!r})"
    elif isinstance(exchange, float | optax.GradientTransformation):  # swapped?
        way_out = ": a rate comes before the exchange, and a direction after it"
    raise ValueError(f"exchange must be an Exchange, got {exchange!r}{way_out}")
