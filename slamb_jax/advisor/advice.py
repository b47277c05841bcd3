"""The prediction of :func:`slamb_jax.advise`, its verdict and its table."""

import dataclasses
import textwrap
from typing import ClassVar, NamedTuple

from slamb_jax.advisor.units import TIMES, scaled
from slamb_jax.exchange.settings import Exchange
from slamb_jax.wire.report import format_table


class Recorded(NamedTuple):
    """How far losses ended from dense AdamW's after as many steps, in per cent.

    Each was at its best rate, and at the better of b1 0.9 and 0.8 that was tried, on
    small language models: ``frontier.md`` and ``scale.md`` in ``benchmarks/results``.
    """

    interval: tuple[float, float]  #: the ends of the intervals of 95 % of all sizes
    sizes: tuple[int, int]  #: the fewest and the most parameters that were tried


#: That of :func:`slamb_jax.adamw` with all of its momentum exchanged, by payload.
RECORDED = {
    "ternary": Recorded((-2.6, 4.0), (23_008, 426_920)),
    "largest_of_7": Recorded((1.5, 11.6), (23_008, 120_576)),
    "largest_of_31": Recorded((12.8, 16.9), (120_576, 120_576)),
    "largest_of_127": Recorded((25.7, 31.2), (120_576, 120_576)),
}


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Predicted cost of a step; averages of the parameters are amortized."""

    bytes_per_step: float  #: that each worker sends, as wire_report counts them
    compute_seconds: float  #: forward and backward pass
    exchange_seconds: float  #: all collectives
    update_seconds: float  #: update of the optimizer, and its application
    local_bytes_per_step: float = 0.0  #: those that stay within a node
    latency_seconds: float = 0.0  #: of the exchange, which fewer bytes do not shorten

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: compute, exchange and update in sequence."""
        return self.compute_seconds + self.exchange_seconds + self.update_seconds


@dataclasses.dataclass(frozen=True)
class Advice:
    """Predictions of :func:`advise`; prints as a table with a verdict."""

    dense: StepCost  #: a step whose gradients are averaged in float32
    dense_bfloat16: StepCost  #: a step whose gradients are averaged in bfloat16
    exchanging: StepCost  #: a step with the exchange
    routes: dict[str, StepCost]  #: the same by the routes ``"owners"`` and ``"all"``
    title: str  #: the question, in words
    #: Bytes of a step over those of averaging gradients in float32, as
    #: :meth:`Exchange.share` counts them, and by way of all n / 2 times as many; over
    #: those in bfloat16 it is twice as much.
    share: float
    exchange: Exchange  #: the one asked for, in the payload that keeps to a budget
    recorded: Recorded | None  #: the loss of :func:`adamw` with such an exchange

    #: The least speed-up that pays; less is within the model's error.
    THRESHOLD: ClassVar[float] = 1.05

    @property
    def speedup(self) -> float:
        """How many times as fast as a dense step in float32."""
        return self.dense.step_seconds / self.exchanging.step_seconds

    @property
    def speedup_bfloat16(self) -> float:
        """How many times as fast as a dense step in bfloat16."""
        return self.dense_bfloat16.step_seconds / self.exchanging.step_seconds

    @property
    def speedup_hidden(self) -> float:
        """The same as one in bfloat16 whose exchange hides behind the backward pass."""
        dense = self.dense_bfloat16
        hidden = max(dense.compute_seconds, dense.exchange_seconds)
        return (hidden + dense.update_seconds) / self.exchanging.step_seconds

    @property
    def faster(self) -> bool:
        """Whether all speed-ups, to the two digits printed, reach ``THRESHOLD``."""
        # Beside the fastest dense step it is the least of the three.
        return round(self.speedup_hidden, 2) >= self.THRESHOLD

    @property
    def pays(self) -> bool:
        """Whether a step is ``faster``, and no loss above dense AdamW's is recorded."""
        return self.faster and (self.recorded is None or self.recorded.interval[0] <= 0)

    @property
    def verdict(self) -> str:
        """``"may pay: ..."``, ``"doubtful: ..."`` or ``"will not pay: ..."``.

        A step that is not faster will not pay. One that is may not if a dense step
        that hides its exchange is as fast, or if its loss was higher where it was
        recorded.
        """
        if self.pays:
            outcome = "may pay"
        elif round(self.speedup_bfloat16, 2) >= self.THRESHOLD:
            outcome = "doubtful"
        else:
            outcome = "will not pay"
        loss = "No loss is recorded for this exchange"
        if self.recorded is not None:
            low, high = self.recorded.interval
            sizes = " to ".join(f"{x:,}" for x in dict.fromkeys(self.recorded.sizes))
            loss = (
                f"In {self.exchange.payload} the loss differed from dense AdamW's "
                f"after as many steps by {low:+.1f} to {high:+.1f} % (the intervals of "
                f"95 %), on small language models of {sizes} parameters, each at its "
                "best b1 and rate (benchmarks/results, in the repository). For other "
                "models no loss is forecast"
            )
        return (
            f"{outcome}: a step is {self.speedup:.2f} times as fast as a dense one in "
            f"float32, {self.speedup_bfloat16:.2f} times as fast as one in bfloat16, "
            f"and {self.speedup_hidden:.2f} times as one in bfloat16 that hides its "
            "exchange behind the compute as far as it can. To pay, all must be "
            f"{self.THRESHOLD} or more, and the loss, where it is recorded, not surely "
            f"higher than dense AdamW's. {loss}: train a dense run beside it."
        )

    def __str__(self) -> str:
        times = ("compute", "exchange", "update", "step")
        rows: list[tuple[str, ...]] = [("", "MB sent", *times, "vs f32", "vs bf16")]
        names = ("dense, float32", "dense, bfloat16", "exchanging")
        costs = (self.dense, self.dense_bfloat16, self.exchanging)
        for name, cost in zip(names, costs, strict=True):
            sent = f"{cost.bytes_per_step / 1e6:.4g}"
            seconds = (scaled(getattr(cost, f"{x}_seconds"), TIMES) for x in times)
            gains = (f"{x.step_seconds / cost.step_seconds:.2f}" for x in costs[:2])
            rows.append((name, sent, *seconds, *gains))
        texts = [self.verdict]
        if not (self.dense.update_seconds or self.exchanging.update_seconds):
            texts.append(
                "Both updates are taken to be free: python -m benchmarks.step, in the "
                "repository, measures them for slamb_jax.advise."
            )
        late = self.exchanging.latency_seconds / self.exchanging.step_seconds
        if late >= 0.25:
            texts.append(
                f"Latency is {late:.0%} of the exchanging step. Fewer bytes do not "
                "shorten it; fewer exchanges do: where all workers draw from the same "
                "data, an exchange without a selection, with sync_every=10 or more and "
                "an outer optimizer."
            )
        for route, cost in self.routes.items():
            if self.exchanging.step_seconds / cost.step_seconds >= self.THRESHOLD:
                texts.append(
                    f'With route="{route}" a step takes '
                    f"{scaled(cost.step_seconds, TIMES)}, and each worker sends "
                    f"{cost.bytes_per_step / 1e6:.4g} MB."
                )
        texts = [textwrap.fill(text, 88) for text in texts]
        return "\n".join([self.title, format_table(rows, str.rjust), *texts])
