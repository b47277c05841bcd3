"""Tunes the rates of both optimizers on the main job: one run for each setting.

Run from the root of the repository: ``python -m examples.byte_lm.sweep``. About a
minute a run on two cores.
"""

import dataclasses
import itertools

import tyro

from examples.byte_lm import data
from examples.byte_lm.main import worker_mesh
from examples.byte_lm.train import Config, lamb, slamb, train


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The grid: LAMB over its rates, SLAMB over rates, freshness decays and H."""

    base: Config
    lamb_rates: tuple[float, ...] = (0.01, 0.015, 0.02, 0.03, 0.05)
    slamb_rates: tuple[float, ...] = (0.01, 0.02, 0.03, 0.05)
    b3s: tuple[float, ...] = (0.5, 0.7, 0.9)
    sync_everys: tuple[int, ...] = (10, 25, 100)


def main(sweep: Sweep) -> None:
    base = sweep.base
    runs = [(lamb, {"lamb_rate": rate}) for rate in sweep.lamb_rates]
    grid = itertools.product(sweep.slamb_rates, sweep.b3s, sweep.sync_everys)
    runs += [
        (slamb, {"slamb_rate": rate, "b3": b3, "sync_every": every})
        for rate, b3, every in grid
    ]
    files = data.text_files(base.files) if base.files else data.standard_library()
    text, held_out = data.load(files, base.context)
    mesh = worker_mesh(base.workers)
    for make, setting in runs:
        config = dataclasses.replace(base, **setting)
        result = train(
            make.__name__,
            make(config),
            config,
            text,
            held_out,
            mesh,
            lambda step, losses: None,
        )
        print(f"{result.losses[-1]:.3f}  {result.name}  {setting}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Sweep, description=__doc__))
