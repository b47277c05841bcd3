"""Training where each worker sees other data: two of the ten digits, say.

An MLP of scikit-learn's digits, five workers of 16 images, 600 steps with a cosine:
once all workers draw from all images, once each has two of the ten classes, as hosts
that read other files would. The loss is that of the training images, the accuracy that
of the others, and agreement is ``slamb_jax.momentum_agreement`` after 100 steps.
"""

import functools

import optax

import slamb_jax
from benchmarks.train.methods import (
    averaged,
    dense,
    exchanging,
    local,
    sparseloco,
)
from benchmarks.train.trials import Grid, Setting, Trial

SGD = functools.partial(slamb_jax.sgd, momentum=0.9)
PAYLOADS = {
    "adamw": "ternary",
    "adamw, 4 bits": "uniform4",
    **{f"adamw, b2 0.999, largest of {k}": f"largest_of_{k}" for k in (7, 31, 127)},
    "adamw, float32": None,
}
LOW, ADAM_RATES = (1e-3, 3e-3), (1e-3, 3e-3, 1e-2)
RATES = {
    "optax.adamw": (dense(optax.adamw, 1e-3), ADAM_RATES),
    **{
        name: (exchanging(slamb_jax.adamw, 1e-3, payload), ADAM_RATES)
        for name, payload in PAYLOADS.items()
    },
    "SGD (dense)": (dense(optax.sgd, 0.1, momentum=0.9), (0.03, 0.1)),
    "sgd": (exchanging(SGD, 0.1), (0.03, 0.1)),
    "LAMB (dense)": (dense(optax.lamb, 0.01), (0.01, 0.03)),
    "lamb": (exchanging(slamb_jax.lamb, 0.01), (0.01, 0.03)),
    "Lion (dense)": (dense(optax.lion, 1e-3), (3e-4, 1e-3)),
    "lion": (exchanging(slamb_jax.lion, 1e-3), (3e-4, 1e-3)),
    "lion, 8 bits": (exchanging(slamb_jax.lion, 1e-3, "uniform8"), (3e-4, 1e-3)),
    "Muon (dense)": (dense(optax.contrib.muon, 0.01), (0.01, 0.03)),
    "muon, in 8 bits": (exchanging(slamb_jax.muon, 0.01, "uniform8"), (0.01, 0.03)),
    "adamw, outer, H 30": (local(slamb_jax.adamw, 1e-3, 30, (0.7, 0.5)), LOW),
    "DiLoCo, H 30": (
        local(averaged(optax.adamw), 1e-3, 30, (0.7, 0.5), payload=None), LOW,
    ),
    "SparseLoCo, b2 0.999": (sparseloco(1e-3, 25), LOW),
}  # fmt: skip
METHODS = {name: method for name, (method, _) in RATES.items()}
GIVEN = {name: rates for name, (_, rates) in RATES.items()} | {"DeMo": LOW}
GRIDS = {
    "different_data": Grid(
        "Different data",
        tuple(
            Trial(
                Setting(task, 5, 16, 600), name, rates,
                measures=("loss", "accuracy", "agreement"),
            )
            for task in ("digits_alike", "digits_apart")
            for name, rates in GIVEN.items()
        ),
        dense="optax.adamw",
    )
}  # fmt: skip
