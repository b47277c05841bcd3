"""The prediction of :func:`slamb_jax.advise`, its verdict and its table."""

import dataclasses
import math
import textwrap
from typing import Any, ClassVar

from slamb_jax.exchange.settings import FORMATS
from slamb_jax.wire.report import in_columns

PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

ABOVE_DENSE = dict(zip(FORMATS, (-4.1, -1.6, 5.9, 18.5), strict=True))
"""By payload, how far the loss of :func:`slamb_jax.adamw` was above dense AdamW's after
as many steps, in per cent, in ``benchmarks/results/frontier.md``."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Predicted cost of a step; averages of the parameters are amortized."""

    bytes_per_step: float  #: that each worker sends, as wire_report counts them
    compute_seconds: float  #: forward and backward pass
    exchange_seconds: float  #: all collectives
    update_seconds: float  #: update of the optimizer, and its application
    local_bytes_per_step: float = 0.0  #: those that stay within a node
    hidden_seconds: float = 0.0  #: of the exchange, while the step computes
    latency_seconds: float = 0.0  #: of the exchange, which fewer bytes do not shorten

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the exchange that the step waits for."""
        return self.exchange_seconds - self.hidden_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: compute, exposed exchange and update in sequence."""
        return self.compute_seconds + self.exposed_seconds + self.update_seconds

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the share of the step that does not wait."""
        return 1 - self.exposed_seconds / self.step_seconds


@dataclasses.dataclass(frozen=True)
class Advice:
    """Predictions of :func:`advise`; prints as a table with a verdict."""

    dense: StepCost  #: a step whose gradients are averaged in float32
    dense_bfloat16: StepCost  #: a step whose gradients are averaged in bfloat16
    exchanging: StepCost  #: a step with the exchange
    #: The fastest link, in bits per second, on which ``exchanging`` takes no longer
    #: than ``dense``: infinite from 10 Tbit/s on, 0 if none.
    break_even_link: float
    break_even_link_bfloat16: float  #: the same against ``dense_bfloat16``
    title: str  #: the question, in words
    #: Bytes of a step over those of averaging gradients in float32, as
    #: :meth:`Exchange.share` counts them; over those in bfloat16 it is twice as much.
    share: float
    payload: str  #: the wire format of the exchange
    #: Per cent by which the loss of :func:`adamw` in this wire format was above dense
    #: AdamW's after as many steps; negative if below. None: no loss is recorded.
    expected_loss: float | None

    #: The least speed-up that pays; less is within the model's error.
    THRESHOLD: ClassVar[float] = 1.05
    #: From this share of a step on, latency has a line of its own in the print.
    LATE: ClassVar[float] = 0.25

    @property
    def share_bfloat16(self) -> float:
        """Bytes of a step over those of averaging gradients in bfloat16."""
        return 2 * self.share

    @property
    def speedup(self) -> float:
        """How many times as fast as a dense step in float32."""
        return self.dense.step_seconds / self.exchanging.step_seconds

    @property
    def speedup_bfloat16(self) -> float:
        """How many times as fast as a dense step in bfloat16."""
        return self.dense_bfloat16.step_seconds / self.exchanging.step_seconds

    @property
    def faster(self) -> bool:
        """Whether both speed-ups, to the two digits printed, reach ``THRESHOLD``."""
        return round(min(self.speedup, self.speedup_bfloat16), 2) >= self.THRESHOLD

    @property
    def pays(self) -> bool:
        """Whether a step is ``faster``, and no loss above dense AdamW's is recorded."""
        return self.faster and (self.expected_loss or 0.0) <= 0.0

    @property
    def verdict(self) -> str:
        """``"will pay: ..."``, or ``"will not pay: ..."``, and the reason.

        It is ``"may not pay: ..."`` for a step that is faster at a higher loss, and
        ``"may pay: ..."`` for one that is faster and whose loss is not recorded.
        """
        will = "may not" if self.faster else "will not"
        if self.pays:
            will = "may" if self.expected_loss is None else "will"
        share = self.dense_bfloat16.exchange_seconds / self.dense_bfloat16.step_seconds
        loss = "No loss is recorded for this exchange: train a dense run beside it."
        if self.expected_loss is not None:
            loss = (
                f"In {self.payload} expect a loss {abs(self.expected_loss):.1f} % "
                f"{'below' if self.expected_loss < 0 else 'above'} dense AdamW's after "
                "as many steps, as recorded with AdamW at b1 0.9, both rates tuned, on "
                "a small language model, 8 workers of 8 sequences "
                "(benchmarks/results/frontier.md)."
            )
        return (
            f"{will} pay: a step is {self.speedup:.2f} times as fast as a dense one in "
            f"float32 and {self.speedup_bfloat16:.2f} times as fast as one in "
            f"bfloat16, whose exchange is {share:.0%} of its step; to pay, both must "
            f"be {self.THRESHOLD} or more, without a higher loss. {loss}"
        )

    def to_json(self) -> dict[str, Any]:
        """The numbers and the verdict as JSON can hold them; None is infinity."""
        names = [k for k, x in vars(Advice).items() if isinstance(x, property)]
        numbers = dataclasses.asdict(self) | {x: getattr(self, x) for x in names}
        return {k: None if x == math.inf else x for k, x in numbers.items()}

    def __str__(self) -> str:
        times = ("compute", "exchange", "hidden", "update", "step")
        rows: list[tuple[str, ...]]
        rows = [("", "MB sent", *times, "vs f32", "vs bf16")]
        costs = (self.dense, self.dense_bfloat16, self.exchanging)
        names = ("dense, float32", "dense, bfloat16", "exchanging")
        for name, cost in zip(names, costs, strict=True):
            sent = f"{cost.bytes_per_step / 1e6:.4g}"
            seconds = [duration(getattr(cost, f"{x}_seconds")) for x in times]
            gains = [f"{x.step_seconds / cost.step_seconds:.2f}" for x in costs[:2]]
            rows.append((name, sent, *seconds, *gains))
        no_link = {0.0: "none is slow enough", math.inf: "none is too fast"}
        wide, narrow = (
            no_link.get(x) or scaled(x, "bit/s")
            for x in (self.break_even_link, self.break_even_link_bfloat16)
        )
        links = f"Break-even link: {wide} against float32, {narrow} against bfloat16."
        if not (self.dense.update_seconds or self.exchanging.update_seconds):
            links += (
                " Both updates are taken to be free: python -m benchmarks.step, in the "
                "repository, measures their seconds; give both."
            )
        said = [self.verdict, links]
        waits = min(self.exchanging.latency_seconds, self.exchanging.exposed_seconds)
        late = waits / self.exchanging.step_seconds
        if late >= self.LATE:
            said.append(
                f"Latency is {late:.0%} of the exchanging step. Fewer bytes do not "
                "shorten it; fewer exchanges do: sync_every=10 or more and an outer "
                "optimizer."
            )
        said = [textwrap.fill(x, 88) for x in said]
        return "\n".join([self.title, in_columns(rows, str.rjust), *said])


def scaled(value: float, unit: str) -> str:
    """Prints ``10 Gbit/s`` or ``340 M parameters``, in three digits."""
    space = " " if len(unit) > len("bit/s") else ""
    for prefix, factor in reversed(PREFIXES.items()):
        if prefix and value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{space}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """Prints ``1.2 s`` or ``30 ms``, in three digits."""
    unit = next((u for u, f in TIMES.items() if seconds >= 0.9995 * f), "ns")
    return f"{seconds / TIMES[unit]:.3g} {unit}"
