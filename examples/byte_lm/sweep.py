"""Tunes the peak rates of the main job's optimizers: one run for each rate.

Run from the root of the repository: ``python -m examples.byte_lm.sweep``. Under a
minute a run on two cores. Other optimizers by name: ``--job.optimizer lars``.
"""

import dataclasses
import math

import jax
import tyro

from examples.byte_lm.main import Config, job
from examples.byte_lm.methods import METHODS, method
from examples.common.options import exchange_settings
from examples.common.simulated import Program, train


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The optimizers of the job, each at all rates."""

    job: Config
    rates: tuple[float, ...] = ()
    """Without: from half the rate in methods.py to twice that."""


def main(sweep: Sweep, settings: dict[str, object]) -> None:
    config, task = sweep.job, job(sweep.job)
    for name in config.optimizer:
        chosen = method(name, config.steps, config.seed, settings)
        program = Program(
            task, chosen, workers=config.workers, batch=config.batch, steps=config.steps
        )
        losses = {}
        around = [round(METHODS[name].rate * 2**x, 6) for x in (-1, -0.5, 0, 0.5, 1)]
        for rate in sweep.rates or around:
            run = train(program, rate, config.seed, due=[config.steps])
            losses[rate] = run.losses[-1]
            print(f"{losses[rate]:.3f}  {chosen.name}  rate {rate:g}", flush=True)
        finite = {rate: x for rate, x in losses.items() if math.isfinite(x)}
        if finite:
            print(f"best: {min(finite, key=finite.__getitem__):g}", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    settings, rest = exchange_settings()
    main(tyro.cli(Sweep, args=rest, description=__doc__), settings)
