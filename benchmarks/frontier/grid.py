"""The settings in which all methods are compared."""

import dataclasses

SEEDS = (0, 1, 2)
SHORT = 200  # steps; longer runs take the rates of these
TUNED_IN_FULL = ("digits",)  # there the best rate of a short run diverges in a long one


@dataclasses.dataclass(frozen=True)
class Setting:
    """A task and its size."""

    task: str
    workers: int
    batch: int  # sequences or images, per worker and step
    steps: int

    def short(self) -> "Setting":
        """The same, in no more than ``SHORT`` steps."""
        return dataclasses.replace(self, steps=min(self.steps, SHORT))

    def tuned_on(self) -> "Setting":
        """The setting in which its rates are tuned."""
        return self if self.task in TUNED_IN_FULL else self.short()

    def __str__(self) -> str:
        return f"{self.task}-{self.workers}x{self.batch}-{self.steps}"


NOISY = Setting("byte_lm", 8, 8, 300)  # short, and little data per worker and step
LARGE = Setting("byte_lm", 4, 48, 900)  # long, and much
CORE = (
    NOISY,
    LARGE,
    *(Setting("digits", workers, 4, SHORT) for workers in (4, 16, 64)),
    Setting("digits", 16, 4, 1000),
    Setting("byte_lm", 64, 2, SHORT),
)
GRIDS = {"core": CORE, "smoke": (Setting("digits", 4, 4, 50),)}
