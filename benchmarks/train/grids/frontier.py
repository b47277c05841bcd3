"""Loss against bytes: the exchange of this library beside its rivals.

Every method has its rate searched and then three seeds. An outer step has one of
several rates and momenta, of which the best counts. ``frontier`` is one task in four
sizes, ``unseen`` are tasks that no setting of an exchange was chosen on, ``big`` is a
larger model. The claims are that a method ends at most 1 % above a dense one, tried on
seeds that neither rate was chosen on; all of that was written down before the runs.
"""

from benchmarks.train.methods import METHODS
from benchmarks.train.trials import SEEDS, Comparison, Grid, Setting, Trial

NOISY = Setting("byte_lm", 8, 8, 300)  # short, and little data per worker and step
APART = Setting("byte_lm_apart", 8, 8, 300)  # each worker has files of its own
LARGE = Setting("byte_lm", 4, 48, 900)  # long, and much
MANY = Setting("byte_lm", 64, 2, 200)
UNSEEN = (
    Setting("prose", 4, 16, 400),
    Setting("wide", 16, 4, 300),
    Setting("gru", 8, 8, 300),
    Setting("masked", 2, 32, 500),
    Setting("digits", 4, 32, 400),
    Setting("autoencoder", 8, 16, 500),
)
# Where the loss differs more between seeds than between rates, the rate is chosen on
# the mean of the seeds.
NOISIEST = UNSEEN[4]
TESTED_ON = tuple(range(1, 9))
CLAIMS = (  # setting, method, the dense one
    (NOISY, "adamw, b1 0.8, H 1", "AdamW, b1 0.8"),
    (NOISY, "adamw, H 1", "AdamW"),
    (MANY, "adamw, b1 0.8, H 1", "AdamW, b1 0.8"),
    (APART, "adamw, H 1", "AdamW"),
)


def trials(*settings: Setting) -> tuple[Trial, ...]:
    """Every method in these settings; those of a claim on further seeds."""
    claimed = {(setting, name) for setting, *both in CLAIMS for name in both}
    return tuple(
        Trial(
            setting,
            name,
            tuned_on=SEEDS if setting == NOISIEST else SEEDS[:1],
            tested_on=TESTED_ON if (setting, name) in claimed else (),
        )
        for setting in settings
        for name in METHODS
    )


GRIDS = {
    "frontier": Grid(
        "Loss against bytes",
        trials(NOISY, APART, LARGE, MANY),
        comparisons=tuple(
            Comparison(f"{a} beside {b}", (a,), (b,), (setting,), TESTED_ON)
            for setting, a, b in CLAIMS
        ),
    ),
    "unseen": Grid("Loss against bytes", trials(*UNSEEN)),
    "big": Grid("Loss against bytes", trials(Setting("byte_lm_3m", 4, 8, 2000))),
    "smoke": Grid("Loss against bytes", trials(Setting("digits", 4, 4, 50))),
}
