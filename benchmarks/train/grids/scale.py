"""Does the difference to dense training grow with the model, or with the steps?

Six sizes on 20 bytes of text for each parameter, in whole rounds, and the smallest in
more steps. Every rate is searched at every size; of b1 0.9 and 0.8, as far as they were
run, the better counts. ``huge`` is for a GPU (benchmarks/gpu.sh): 82 MB of text for
10.8 M parameters, at two rates and one seed; ``tiny`` tries the same code on a CPU.
"""

from benchmarks.train.trials import SEEDS, Comparison, Grid, Setting, Trial

SIZES = tuple(
    Setting(task, 8, 8, steps)
    for task, steps in (
        ("byte_lm_23k", 125),
        ("byte_lm_52k", 250),
        ("byte_lm", 600),
        ("byte_lm_427k", 2075),
        ("byte_lm_1600k", 7575),
        ("byte_lm_3m", 15825),
    )
)
LONGER = tuple(Setting("byte_lm_23k", 8, 8, steps) for steps in (500, 2000))
ADAMW = "AdamW", "AdamW, b1 0.8"
OURS = "adamw, H 1", "adamw, b1 0.8, H 1"
COMPARED = {  # a name, its methods, and the dense ones
    "adamw, 1/19": (OURS, ADAMW),
    "adamw, 1/45": (("adamw, largest of 7",), ADAMW),
    "adamw, 1/180": (("adamw, outer, H 10, outer 1 0.5",), ADAMW),
    "muon, 1/18": (("muon, H 1",), ("Muon",)),
}
SHOWN = dict.fromkeys(x for both in COMPARED.values() for part in both for x in part)
AT_TWO_RATES = {
    "huge": (
        Setting("byte_lm_10m", 8, 128, 1250),
        {"AdamW": (0.00145, 0.00206), "adamw, H 1": (0.000727, 0.00103)},
    ),
    "tiny": (
        Setting("byte_lm_tiny", 8, 2, 50),
        {"AdamW": (0.032, 0.0453), "adamw, H 1": (0.016, 0.0226)},
    ),
}

GRIDS = {
    "scale": Grid(
        "Loss against the size of the model, 20 bytes of text for each parameter",
        (
            *(Trial(setting, name) for setting in SIZES for name in SHOWN),
            *(Trial(setting, name) for setting in LONGER for name in ADAMW + OURS),
        ),
        comparisons=(
            *(Comparison(name, *both, SIZES) for name, both in COMPARED.items()),
            Comparison("adamw, 1/19, longer", OURS, ADAMW, LONGER),
        ),
    ),
    **{
        name: Grid(
            "A larger model",
            tuple(Trial(setting, *row, seeds=SEEDS[:1]) for row in rates.items()),
        )
        for name, (setting, rates) in AT_TWO_RATES.items()
    },
}
