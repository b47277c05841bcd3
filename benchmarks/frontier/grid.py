"""The settings in which all methods are compared."""

import dataclasses

SEEDS = (0, 1, 2)
SHORT, LONG = 200, 300  # steps: longer runs than LONG take the rates of SHORT ones


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
        return self if self.steps <= LONG else self.short()

    def __str__(self) -> str:
        return f"{self.task}-{self.workers}x{self.batch}-{self.steps}"


NOISY = Setting("byte_lm", 8, 8, 300)  # short, and little data per worker and step
LARGE = Setting("byte_lm", 4, 48, 900)  # long, and much
MANY = Setting("byte_lm", 64, 2, SHORT)
CORE = (NOISY, LARGE, MANY)
GRIDS = {"core": CORE, "smoke": (Setting("digits", 4, 4, 50),)}
