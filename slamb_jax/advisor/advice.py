"""The prediction of :func:`slamb_jax.advise`, its verdict and its table."""

import dataclasses
import math
import textwrap
from typing import Any, ClassVar

from slamb_jax.advisor.units import duration, scaled


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Predicted cost of a step; averages of the parameters are amortized.

    Attributes:
      bytes_per_step: bytes that each worker sends, as :func:`wire_report` has them.
      compute_seconds: forward and backward pass.
      exchange_seconds: all collectives.
      update_seconds: update of the optimizer, and its application.
      local_bytes_per_step: the part of ``bytes_per_step`` that stays within a node.
      hidden_seconds: the part of ``exchange_seconds`` that runs during the compute.
    """

    bytes_per_step: float
    compute_seconds: float
    exchange_seconds: float
    update_seconds: float
    local_bytes_per_step: float = 0.0
    hidden_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: compute, exposed exchange and update in sequence."""
        return self.compute_seconds + self.exposed_seconds + self.update_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the exchange that the step waits for."""
        return self.exchange_seconds - self.hidden_seconds

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the share of the step that does not wait."""
        return 1 - self.exposed_seconds / self.step_seconds


@dataclasses.dataclass(frozen=True)
class Advice:
    """Predictions of :func:`advise`; prints as a table with a verdict.

    Attributes:
      dense: a step whose gradients are averaged in float32.
      dense_bfloat16: a step whose gradients are averaged in bfloat16.
      exchanging: a step with the exchange.
      break_even_link: the fastest link, in bits per second, on which ``exchanging``
        takes no longer than ``dense``: infinite from 10 Tbit/s on, 0 if none.
      break_even_link_bfloat16: the same against ``dense_bfloat16``.
      title: the question, in words.
      THRESHOLD: it pays from this speed-up on; less is within the model's error.
    """

    dense: StepCost
    dense_bfloat16: StepCost
    exchanging: StepCost
    break_even_link: float
    break_even_link_bfloat16: float
    title: str

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
    def pays(self) -> bool:
        """Whether both speed-ups, to the two digits printed, reach ``THRESHOLD``."""
        return round(min(self.speedup, self.speedup_bfloat16), 2) >= self.THRESHOLD

    @property
    def verdict(self) -> str:
        """``"will pay: ..."`` or ``"will not pay: ..."``, with the reason."""
        share = self.dense_bfloat16.exchange_seconds / self.dense_bfloat16.step_seconds
        return (
            f"will {'' if self.pays else 'not '}pay: a step is "
            f"{self.speedup:.2f} times as fast as a dense one in float32 and "
            f"{self.speedup_bfloat16:.2f} times as fast as one in bfloat16, whose "
            f"exchange is {share:.0%} of its step; to pay, both must be "
            f"{self.THRESHOLD} or more"
        )

    def to_json(self) -> dict[str, Any]:
        """The numbers and the verdict, as JSON can hold them; None is infinite."""
        found = dataclasses.asdict(self) | {
            "speedup": self.speedup,
            "speedup_bfloat16": self.speedup_bfloat16,
            "pays": self.pays,
            "verdict": self.verdict,
        }
        return {k: None if x == math.inf else x for k, x in found.items()}

    def __str__(self) -> str:
        times = ["compute", "exchange", "hidden", "update", "step"]
        if not self.exchanging.hidden_seconds:
            times.remove("hidden")
        rows = [["", "MB sent", *times, "speed-up"]]
        for name, cost in (
            ("dense, float32", self.dense),
            ("dense, bfloat16", self.dense_bfloat16),
            ("exchanging", self.exchanging),
        ):
            sent = f"{cost.bytes_per_step / 1e6:.4g}"
            seconds = [duration(getattr(cost, f"{x}_seconds")) for x in times]
            gain = f"{self.dense.step_seconds / cost.step_seconds:.2f}"
            rows.append([name, sent, *seconds, gain])
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        table = [
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)])
            for row in rows
        ]
        links = (
            f"Break-even link: {_link(self.break_even_link)} float32, "
            f"{_link(self.break_even_link_bfloat16)} bfloat16."
        )
        if not (self.dense.update_seconds or self.exchanging.update_seconds):
            links += " Both updates are taken to be free: give their seconds."
        said = [textwrap.fill(x, 88) for x in (f"{self.verdict}.", links)]
        return "\n".join([self.title, *table, *said])


def _link(rate: float) -> str:
    if rate == 0:
        return "no link is slow enough against"
    if math.isinf(rate):
        return "no link is too fast against"
    return f"{scaled(rate, 'bit/s')} against"
