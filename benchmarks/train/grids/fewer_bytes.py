"""How much 1/45 of the bytes costs in longer and longer runs.

AdamW on one seed at b1 0.8, with v of the mean momentum, in float32 too. The recorded
runs were made on one vector of all parameters, by what the codes stand for. The lines
of the results that have no trial here are of ways to send that were tried on it and
never built: prediction of what was received, turns, a low rank, codes of the mean that
differ from the workers'. None came within 1 % of dense AdamW at 1/45 (docs/design.md).
"""

from benchmarks.train.methods import ADAM, adamw, exchanging
from benchmarks.train.trials import Grid, Setting, Trial

PAYLOADS = {"float32": None, "largest of 7": "largest_of_7"}
METHODS = {
    f"{name}, b1 0.8": exchanging(adamw, 0.008, payload, b1=0.8, **ADAM)
    for name, payload in PAYLOADS.items()
}
RATES = {
    Setting("byte_lm", 8, 8, 300): (0.008, 0.0113),
    Setting("byte_lm", 8, 8, 1200): (0.00566,),
    Setting("byte_lm", 8, 8, 4800): (0.004,),
    Setting("byte_lm_apart", 8, 8, 1200): (0.00566,),
}
GRIDS = {
    "fewer_bytes": Grid(
        "Fewer bytes",
        tuple(
            Trial(setting, name, rates, (0,))
            for setting, rates in RATES.items()
            for name in METHODS
        ),
        dense="float32, b1 0.8",
    )
}
