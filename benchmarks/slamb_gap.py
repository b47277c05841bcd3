"""SLAMB beside dense LAMB: which link makes the gap, and whether length closes it.

Run from the root of the repository: ``python -m benchmarks.slamb_gap``. Each variant
has a rate of its own, found on seed 0 by steps of the root of two; then three seeds. k
is 0.1, as in the paper. Runs that are in the results are not made again. A run of 300
steps takes a core a minute.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.frontier.results import Results, lowest, rate_of
from benchmarks.frontier.tasks import TASKS, schedule, task
from examples.common.optimizers import dense
from examples.common.options import check_names
from examples.common.simulated import AXIS, Method, Program, evaluation_steps, train
from examples.common.tables import spread, table
from examples.hardware import hardware
from slamb_jax import Exchange, compressors, directions, selections

WORKERS, BATCH, MIDDLE = 8, 8, 0.02
LAMB = "LAMB, dense"
RESULTS = Path("benchmarks", "slamb_gap.jsonl")
B1, B2, EPS, SHARE = 0.9, 0.999, 1e-6, 0.1
Chain: TypeAlias = Callable[[Any], optax.GradientTransformation]  # of a rate


def slamb(
    *,
    b3: float = 0.99,
    every: int | None = 50,
    share: float = SHARE,
    payload: str | None = None,
    ratios: int = 2,
    rescale: bool = True,
    own_gradient: bool = True,
) -> Chain:
    """SLAMB as its chain of links, with some of it switched off.

    Args:
      b3: of freshness.
      every: H, the steps between averages of the parameters.
      share: k, of the momentum.
      payload: of the selected momentum.
      ratios: 2 of each layer, of the selected and of the other coordinates; or one.
      rescale: whether there is the elementwise rescaling.
      own_gradient: v of the worker's own gradient; else of the momentum that it steps
        by.
    """
    exchange = Exchange.paper(
        AXIS, selection=selections.Strided(share, min_size=1000), sync_every=every,
        payload=payload,
    )  # fmt: skip
    direction: Any = directions.adam(EPS, eps_before_correction=True)
    if not own_gradient:
        direction = optax.scale_by_rms(B2, eps=EPS, bias_correction=True)

    def chain(rate: Any) -> optax.GradientTransformation:
        links = [
            slamb_jax.mask_momentum(
                exchange, direction, B1, B2 if own_gradient else None
            ),
            slamb_jax.layerwise_trust_ratio(exchange, b3=b3 if ratios == 2 else 1.0),
        ]
        if rescale:
            links.append(slamb_jax.elementwise_rescale(exchange, b3=b3))
        links.append(optax.scale_by_learning_rate(rate))
        return optax.chain(*links, slamb_jax.average_parameters_every(exchange))

    return chain


def agreeing(compressor: Any = None, payload: str | None = None) -> Chain:
    """Workers step by the mean of what they send; the rest waits in the momentum."""
    exchange = Exchange(AXIS, payload=payload)
    direction = directions.adam(EPS, eps_before_correction=True)
    return lambda rate: optax.chain(
        slamb_jax.mask_momentum(exchange, direction, B1, B2, compressor=compressor),
        slamb_jax.layerwise_trust_ratio(exchange),
        optax.scale_by_learning_rate(rate),
    )


def random_share(share: float) -> compressors.Codec:
    """Random coordinates of each array, the same ones on all workers."""

    def places(size: int, common: jax.Array) -> jax.Array:
        draws = jax.random.bits(common, (size,), jnp.uint32)
        return jax.lax.top_k(draws, max(1, round(share * size)))[1]

    def encode(x: jax.Array, common: jax.Array, own: jax.Array) -> jax.Array:
        del own
        return x.reshape(-1)[places(x.size, common)]

    def decode(code: Any, like: jax.ShapeDtypeStruct, common: jax.Array) -> jax.Array:
        flat = jnp.zeros(like.size).at[places(like.size, common)].set(code)
        return flat.reshape(like.shape)

    return compressors.Codec(encode, decode, averages=True)


CHAINS: dict[str, Chain] = {
    LAMB: lambda rate: dense(optax.lamb(rate), AXIS),
    "SLAMB": slamb(),
    "SLAMB, b3 0.93": slamb(b3=0.93),
    "SLAMB, b3 0.999": slamb(b3=0.999),
    "SLAMB, H 100": slamb(every=100),
    "SLAMB, H 10": slamb(every=10),
    "SLAMB, H 1": slamb(every=1),
    "SLAMB, all sent": slamb(share=1.0),
    "SLAMB, all sent, H 1": slamb(share=1.0, every=1),
    "SLAMB, one ratio": slamb(ratios=1),
    "SLAMB, no rescaling": slamb(rescale=False),
    "SLAMB, no freshness": slamb(ratios=1, rescale=False),
    "SLAMB, v of the momentum": slamb(own_gradient=False),
    "SLAMB, 8 bits": slamb(payload="uniform8"),
    "SLAMB, 4 bits": slamb(payload="uniform4"),
    "a tenth, agreeing": agreeing(compressors.from_codec(random_share(SHARE), AXIS)),
    "ternary, agreeing": agreeing(payload="ternary"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    only: tuple[str, ...] = tuple(CHAINS)
    task: str = "byte_lm"
    """byte_lm_apart has files of their own for each worker"""
    steps: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = RESULTS.parent
    """where slamb_gap.jsonl is, or will be: elsewhere all is run anew"""


@functools.lru_cache(maxsize=1)
def program(name: str, of_task: str, steps: int) -> Program:
    """The compiled step of a variant, for any rate and seed."""
    return Program(
        task(of_task), Method(name, lambda rate, _: CHAINS[name](rate)),
        workers=WORKERS, batch=BATCH, steps=steps, schedule=schedule(of_task, steps),
    )  # fmt: skip


def loss(name: str, power: int, seed: int, config: Config, results: Results) -> float:
    """The evaluation loss in the end."""
    rate = rate_of(MIDDLE, power)
    key = {
        "variant": name, "task": config.task, "steps": config.steps, "rate": rate,
        "seed": seed,
    }  # fmt: skip

    def run() -> float:
        due = evaluation_steps(config.steps, 4)
        compiled = program(name, config.task, config.steps)
        return train(compiled, rate, seed, due=due).losses[-1]

    return results.once(key, run)


def main(config: Config) -> None:
    check_names("--only", config.only, tuple(CHAINS))
    check_names("--task", (config.task,), tuple(TASKS))
    results, rows, first = Results(config.out / RESULTS.name), [], None
    for name in config.only:

        def of(seed: int, power: int, name: str = name) -> float:
            return loss(name, power, seed, config, results)

        power = lowest(functools.partial(of, config.seeds[0]), -1)
        losses = [of(seed, power) for seed in config.seeds]
        mean = float(np.mean(losses))
        first = mean if first is None else first
        rows.append(
            {
                "": name,
                "rate": f"{rate_of(MIDDLE, power):g}",
                "loss": spread(losses),
                "above the first, %": f"{100 * (mean / first - 1):+.1f}",
            }
        )
    caption = (
        f"{config.task}, {WORKERS} workers x {BATCH}, {config.steps} steps, seeds "
        f"{', '.join(map(str, config.seeds))}; {hardware(jax.devices()[0])}"
    )
    Console(width=100).print(table("SLAMB beside LAMB", rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
