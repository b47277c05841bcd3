"""The settings to compare in: all of them, and a core that takes hours, not days."""

import dataclasses
import itertools

SEEDS = (0, 1, 2)
SHORT, LONG = 200, 1000
BATCHES = {"byte_lm": (2, 8), "masked_lm": (2, 8), "digits": (4, 16)}
WORKERS = (4, 16, 64)
TUNED_WHOLE = ("digits",)  # short runs stand rates there that unlearn all in long ones


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all methods are given alike."""

    task: str
    workers: int
    batch: int  # sequences or images, per worker and step
    steps: int

    def short(self) -> "Setting":
        """The same, in no more than ``SHORT`` steps."""
        return dataclasses.replace(self, steps=min(self.steps, SHORT))

    def tuned_on(self) -> "Setting":
        """Where its rates are tuned: itself where that is cheap, else the short one."""
        return self if self.task in TUNED_WHOLE else self.short()

    def __str__(self) -> str:
        return f"{self.task}-{self.workers}x{self.batch}-{self.steps}"


NOISY = Setting("byte_lm", 8, 8, 300)  # short, and little data per worker and step
LARGE = Setting("byte_lm", 4, 48, 900)  # long, and much
FULL = (
    NOISY,
    LARGE,
    *(
        Setting(task, workers, batch, steps)
        for task in BATCHES
        for workers, batch, steps in itertools.product(
            WORKERS, BATCHES[task], (SHORT, LONG)
        )
    ),
)
CORE = (
    NOISY,
    LARGE,
    *(Setting("digits", workers, 4, SHORT) for workers in WORKERS),
    Setting("digits", 16, 4, LONG),
    Setting("byte_lm", 64, 2, SHORT),
    Setting("masked_lm", 16, 2, SHORT),
)
SMOKE = (Setting("digits", 4, 4, 50),)
GRIDS = {"core": CORE, "full": FULL, "smoke": SMOKE}
