"""The answer of the advisor, and how it reads."""

import dataclasses
import math
import textwrap

from slamb_jax._units import duration, scaled

_WORTH = 1.05  # less is within the error of the model


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a step of one optimizer costs; averages of parameters are amortized.

    Attributes:
      bytes_per_step: bytes that each worker sends, by the ring convention of
        :func:`wire_report`.
      compute_seconds: forward and backward pass.
      exchange_seconds: the exchange.
      optimizer_seconds: update and apply.
      local_bytes_per_step: of ``bytes_per_step`` those that stay within the node.
      hidden_seconds: of the exchange, what runs during the compute.
    """

    bytes_per_step: float
    compute_seconds: float
    exchange_seconds: float
    optimizer_seconds: float
    local_bytes_per_step: float = 0.0
    hidden_seconds: float = 0.0

    @property
    def step_seconds(self) -> float:
        """The whole step: nothing overlaps but what is hidden."""
        return self.compute_seconds + self.exposed_seconds + self.optimizer_seconds

    @property
    def exposed_seconds(self) -> float:
        """The exchange that the step waits for."""
        return self.exchange_seconds - self.hidden_seconds

    @property
    def efficiency(self) -> float:
        """Share of the step that waits for no exchange: the scaling efficiency."""
        return 1 - self.exposed_seconds / self.step_seconds


@dataclasses.dataclass(frozen=True)
class Advice:
    """What :func:`advise` predicts; prints as a table with a verdict.

    Attributes:
      lamb: LAMB with gradients averaged in float32.
      lamb_bfloat16: LAMB with gradients averaged in bfloat16.
      slamb: SLAMB.
      break_even_link: the fastest link, in bits per second, on which SLAMB's step
        takes no longer than ``lamb``'s: infinite if it is faster than 10 Tbit/s, 0 if
        there is none.
      break_even_link_bfloat16: the same against ``lamb_bfloat16``.
      title: what was asked.
    """

    lamb: StepCost
    lamb_bfloat16: StepCost
    slamb: StepCost
    break_even_link: float
    break_even_link_bfloat16: float
    title: str

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
        """Whether SLAMB is faster than both by 5 % or more."""
        return min(self.speedup, self.speedup_bfloat16) >= _WORTH

    @property
    def verdict(self) -> str:
        """``"will pay: ..."`` or ``"will not pay: ..."``, and why."""
        answer = "will pay" if self.pays else "will not pay"
        share = self.lamb_bfloat16.exchange_seconds / self.lamb_bfloat16.step_seconds
        return (
            f"{answer}: a step of SLAMB is {self.speedup:.2f} times as fast as float32 "
            f"LAMB's, {self.speedup_bfloat16:.2f} times as fast as "
            f"bfloat16 LAMB's, whose exchange is {share:.0%} of its step"
        )

    def __str__(self) -> str:
        overlaps = self.slamb.hidden_seconds > 0
        beside = ("hidden",) * overlaps
        head: tuple[str, ...] = ("", "MB sent", "compute", "exchange", *beside)
        head += ("optimizer", "step", "speed-up")
        rows = [head]
        for name, cost in (
            ("LAMB, float32", self.lamb),
            ("LAMB, bfloat16", self.lamb_bfloat16),
            ("SLAMB", self.slamb),
        ):
            seconds = (
                cost.compute_seconds,
                cost.exchange_seconds,
                *(cost.hidden_seconds,) * overlaps,
                cost.optimizer_seconds,
                cost.step_seconds,
            )
            gain = self.lamb.step_seconds / cost.step_seconds
            row = (name, f"{cost.bytes_per_step / 1e6:.4g}", *map(duration, seconds))
            rows.append((*row, f"{gain:.2f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        table = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
            for row in rows
        ]
        wide, narrow = self.break_even_link, self.break_even_link_bfloat16
        return "\n".join(
            [
                self.title,
                *table,
                textwrap.fill(f"{self.verdict}.", 88),
                f"Break-even link: {_break_even(wide, 'float32 LAMB')}, "
                f"{_break_even(narrow, 'bfloat16 LAMB')}.",
            ]
        )


def _break_even(link: float, name: str) -> str:
    if link == 0:
        return f"no link is slow enough against {name}"
    if math.isinf(link):
        return f"no link is too fast against {name}"
    return f"{scaled(link, 'bit/s')} against {name}"
