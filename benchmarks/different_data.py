"""Training where each worker sees other data: two of the ten digits, say.

Run from the root of the repository: ``python -m benchmarks.different_data``. An MLP of
scikit-learn's digits, five simulated workers of 16 images, 600 steps with a cosine:
once all workers draw from all images, once each has two of the ten classes, as hosts
that read other files would. Printed are training loss and test accuracy in the end, and
the median over the leaves of ``slamb_jax.momentum_agreement`` after 100 steps.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import slamb_jax
from benchmarks import rivals
from examples.common.records import progress_bar
from examples.common.simulated import AXIS

WORKERS, BATCH, STEPS = 5, 16, 600
SECONDS = 15  # of a training, about
LOOKED_AT = 100  # the step after which momenta are compared
Make = Callable[[Any], optax.GradientTransformation]


class MLP(nn.Module):
    """64-128-128-10."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


def exchanging(make: Callable[..., Any], **settings: Any) -> Make:
    """An optimizer of this library under an exchange."""
    return lambda rate: make(rate, slamb_jax.Exchange(AXIS, **settings))


def dense(make: Callable[..., Any], **settings: Any) -> Make:
    """An optimizer on the mean gradient."""
    return lambda rate: rivals.dense(make(rate, **settings), AXIS)


ADAMW = functools.partial(optax.adamw, weight_decay=0.0)
SGD = functools.partial(slamb_jax.sgd, momentum=0.9)
NESTEROV = optax.sgd(0.7, momentum=0.5, nesterov=True)
ADAM_RATES = 1e-3, 3e-3, 1e-2
PAYLOADS = {
    "adamw": "ternary",
    "adamw, 4 bits": "uniform4",
    **{f"adamw, largest of {k}": f"largest_of_{k}" for k in (7, 31, 127)},
    "adamw, float32": None,
}
METHODS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "optax.adamw": (dense(optax.adamw), ADAM_RATES),
    **{
        name: (exchanging(slamb_jax.adamw, payload=payload), ADAM_RATES)
        for name, payload in PAYLOADS.items()
    },
    "SGD (dense)": (dense(optax.sgd, momentum=0.9), (0.03, 0.1)),
    "sgd": (exchanging(SGD), (0.03, 0.1)),
    "LAMB (dense)": (dense(optax.lamb), (0.01, 0.03)),
    "lamb": (exchanging(slamb_jax.lamb), (0.01, 0.03)),
    "Lion (dense)": (dense(optax.lion), (3e-4, 1e-3)),
    "lion": (exchanging(slamb_jax.lion), (3e-4, 1e-3)),
    "lion, 8 bits": (exchanging(slamb_jax.lion, payload="uniform8"), (3e-4, 1e-3)),
    "Muon (dense)": (dense(optax.contrib.muon), (0.01, 0.03)),
    "muon, 8 bits": (exchanging(slamb_jax.muon, payload="uniform8"), (0.01, 0.03)),
    **{
        f"{name}, H 30": (
            exchanging(slamb_jax.adamw, sync_every=30, payload=payload, outer=NESTEROV),
            (1e-3, 3e-3),
        )
        for name, payload in (("adamw, outer", "ternary"), ("DiLoCo", None))
    },
    "SparseLoCo, H 25": (
        lambda rate: rivals.sparseloco(ADAMW(rate), AXIS, every=25),
        (1e-3, 3e-3),
    ),
    "DeMo": (lambda rate: rivals.demo(rate, AXIS), (1e-3, 3e-3)),
}


@functools.cache
def images() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels, and which are trained on: four in five."""
    raw = load_digits()
    order = np.random.default_rng(0).permutation(len(raw.target))
    x, y = raw.data[order].astype(np.float32) / 16, raw.target[order].astype(np.int32)
    return x, y, np.arange(len(y)) % 5 != 0


def batches(apart: bool, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For all workers together; ``apart``: each draws from two classes."""
    x, y, kept = images()
    rng = np.random.default_rng(seed)
    pools = [
        np.flatnonzero(kept & (y // 2 == i if apart else True)) for i in range(WORKERS)
    ]
    for _ in range(STEPS):
        chosen = np.concatenate([rng.choice(pool, BATCH) for pool in pools])
        yield x[chosen], y[chosen]


def train(
    make: Make, rate: float, apart: bool, seed: int
) -> tuple[float, float, float]:
    """Training loss and test accuracy in the end, and how far momenta agreed before."""
    x, y, kept = images()
    tx = make(optax.cosine_decay_schedule(rate, STEPS))
    net = MLP()

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = net.apply({"params": params}, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss_of)(params, *batch)
        updates, opt_state = optax.with_extra_args_support(tx).update(
            grads, opt_state, params
        )
        return (optax.apply_updates(params, updates), opt_state), value

    params = net.init(jax.random.key(seed), x[:1])["params"]
    state = slamb_jax.simulated_replicas((params, tx.init(params)), WORKERS)
    run = slamb_jax.simulated_step(step, WORKERS, slamb_jax.Exchange(AXIS))
    agreement = float("nan")
    for t, batch in enumerate(batches(apart, seed), 1):
        state, _ = run(state, batch)
        if t == LOOKED_AT:
            with contextlib.suppress(ValueError):  # of another library's momentum
                agreements = slamb_jax.momentum_agreement(state[1])
                agreement = float(np.median(list(agreements.values())))
    params = slamb_jax.consolidate(state[0])
    logits: Any = net.apply({"params": params}, x[~kept])
    right = jnp.argmax(logits, -1) == y[~kept]
    accuracy = float(jnp.mean(right.astype(jnp.float32)))
    return float(loss_of(params, x[kept], y[kept])), accuracy, agreement


@dataclasses.dataclass(frozen=True)
class Config:
    """The methods to run."""

    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """a method, or else all whose names have this in them; repeat it"""
    seeds: int = 3


def chosen(config: Config) -> dict[str, tuple[Make, tuple[float, ...]]]:
    """The methods that ``only`` means."""

    def is_meant(name: str) -> bool:
        return any(name == x if x in METHODS else x in name for x in config.only)

    found = {x: METHODS[x] for x in METHODS if not config.only or is_meant(x)}
    if not found:
        raise SystemExit(f"--only: no method has any of {', '.join(config.only)}")
    return found


def main(config: Config, console: Console | None = None) -> None:
    if not any(part in name for part in config.only or METHODS for name in METHODS):
        raise SystemExit(f"--only: {[*config.only]} are in none of {[*METHODS]}")
    columns = "loss", "accuracy, %", "agreement"
    table = Table(
        "method", "rate", *(f"{x}, {y}" for x in ("alike", "apart") for y in columns)
    )
    methods = chosen(config)
    count = 2 * config.seeds * sum(len(rates) for _, rates in methods.values())
    print(f"{count} trainings, about {SECONDS} s each on two cores", flush=True)
    done = itertools.count(1)
    with progress_bar("different data", 0, count) as move:
        for name, (make, rates) in methods.items():
            for rate in rates:
                cells = []
                for apart in (False, True):
                    runs = []
                    for seed in range(config.seeds):
                        runs.append(train(make, rate, apart, seed))
                        note = f"{name}, rate {rate:g}, seed {seed}"
                        move(next(done), f"{note}, {'apart' if apart else 'alike'}")
                    loss, accuracy, agreement = np.mean(runs, 0)
                    cells += [f"{loss:.5f}", f"{100 * accuracy:.1f}"]
                    cells += ["" if np.isnan(agreement) else f"{agreement:.2f}"]
                table.add_row(name, f"{rate:g}", *cells)
    (console or Console(width=100)).print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
