"""The prediction of :func:`slamb_jax.advise`, its verdict and its table."""

import dataclasses
import math
import textwrap
from typing import ClassVar

from slamb_jax.advisor.units import duration, scaled


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Predicted cost of a step; averages of the parameters are amortized.

    Attributes:
      bytes_per_step: bytes that each worker sends, as :func:`wire_report` has them.
      compute_seconds: forward and backward pass.
      exchange_seconds: all collectives.
      optimizer_seconds: update of the optimizer, and its application.
      local_bytes_per_step: the part of ``bytes_per_step`` that stays within a node.
      hidden_seconds: the part of ``exchange_seconds`` that runs during the compute.
    """

    bytes_per_step: float
    compute_seconds: float
    exchange_seconds: float
    optimizer_seconds: float
    local_bytes_per_step: float = 0.0
    hidden_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: compute, exposed exchange and optimizer in sequence."""
        return self.compute_seconds + self.exposed_seconds + self.optimizer_seconds

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
      lamb: LAMB with gradients averaged in float32.
      lamb_bfloat16: LAMB with gradients averaged in bfloat16.
      slamb: SLAMB.
      break_even_link: the fastest link, in bits per second, on which SLAMB's step
        takes no longer than ``lamb``'s: infinite from 10 Tbit/s on, 0 if none.
      break_even_link_bfloat16: the same against ``lamb_bfloat16``.
      title: the question, in words.
      THRESHOLD: SLAMB pays from this speed-up on; less is within the model's error.
    """

    lamb: StepCost
    lamb_bfloat16: StepCost
    slamb: StepCost
    break_even_link: float
    break_even_link_bfloat16: float
    title: str

    THRESHOLD: ClassVar[float] = 1.05

    @property
    def speedup(self) -> float:
        """How many times as fast as float32 LAMB a step of SLAMB is."""
        return self.lamb.step_seconds / self.slamb.step_seconds

    @property
    def speedup_bfloat16(self) -> float:
        """How many times as fast as bfloat16 LAMB a step of SLAMB is."""
        return self.lamb_bfloat16.step_seconds / self.slamb.step_seconds

    @property
    def pays(self) -> bool:
        """Whether both speed-ups, to the two digits printed, reach ``THRESHOLD``."""
        return round(min(self.speedup, self.speedup_bfloat16), 2) >= self.THRESHOLD

    @property
    def verdict(self) -> str:
        """``"will pay: ..."`` or ``"will not pay: ..."``, with the reason."""
        share = self.lamb_bfloat16.exchange_seconds / self.lamb_bfloat16.step_seconds
        return (
            f"will {'' if self.pays else 'not '}pay: a step of SLAMB is "
            f"{self.speedup:.2f} times as fast as float32 LAMB's and "
            f"{self.speedup_bfloat16:.2f} times as fast as bfloat16 LAMB's, whose "
            f"exchange is {share:.0%} of its step; to pay, both must be "
            f"{self.THRESHOLD} or more"
        )

    def __str__(self) -> str:
        times = ["compute", "exchange", "hidden", "optimizer", "step"]
        if not self.slamb.hidden_seconds:
            times.remove("hidden")
        rows = [["", "MB sent", *times, "speed-up"]]
        for name, cost in (
            ("LAMB, float32", self.lamb),
            ("LAMB, bfloat16", self.lamb_bfloat16),
            ("SLAMB", self.slamb),
        ):
            sent = f"{cost.bytes_per_step / 1e6:.4g}"
            seconds = [duration(getattr(cost, f"{x}_seconds")) for x in times]
            gain = f"{self.lamb.step_seconds / cost.step_seconds:.2f}"
            rows.append([name, sent, *seconds, gain])
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        table = [
            "  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)])
            for row in rows
        ]
        links = (
            f"Break-even link: {_link(self.break_even_link)} float32 LAMB, "
            f"{_link(self.break_even_link_bfloat16)} bfloat16 LAMB."
        )
        said = [textwrap.fill(x, 88) for x in (f"{self.verdict}.", links)]
        return "\n".join([self.title, *table, *said])


def _link(rate: float) -> str:
    if rate == 0:
        return "no link is slow enough against"
    if math.isinf(rate):
        return "no link is too fast against"
    return f"{scaled(rate, 'bit/s')} against"
