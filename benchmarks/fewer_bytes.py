"""Ways to send fewer bytes than the default, tried before any of them is built.

Run from the root of the repository: ``python -m benchmarks.fewer_bytes``. AdamW on the
frontier's job, with all parameters in one vector: what the codes stand for is computed,
and no bytes are made, so that a way to send is a line of ``TRIALS``. Runs that are in
the results are not made again. A run of 300 steps takes a core a minute.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.flatten_util import ravel_pytree
from rich.console import Console

from benchmarks.frontier.results import Results
from benchmarks.frontier.tasks import TASKS, task
from examples.common.options import check_names
from examples.common.tables import spread, table
from examples.hardware import hardware
from slamb_jax.exchange.codes import quantizer_of

B2, TOGETHER = 0.95, 2
RESULTS = Path("benchmarks", "fewer_bytes.jsonl")
CODES = "uniform4", "ternary", "sign", "largest_of_7", "largest_of_31", "largest_of_127"


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is sent of the momentum, and what waits; see ``mask_momentum``."""

    up: str | None
    """the wire format of a worker's momentum; None: float32"""
    down: str | None = ""
    """that of the mean; as the worker's, if not said"""
    turns: int = 1
    """each coordinate is sent at every so manieth step"""
    b1: float = 0.8
    after: float = 0.0
    """decay rate of a momentum after the exchange"""
    b2: float = B2
    forgotten: float = 0.5
    mean_waits: float = 0.0
    """the share of what rounding takes of the mean that waits, with one worker"""


TRIALS = {
    "float32": Trial(None),
    "ternary": Trial("ternary"),
    "sign": Trial("sign"),
    "largest of 7": Trial("largest_of_7"),
    "float32, half of the coordinates by turns": Trial(None, turns=2),
    "ternary, half of the coordinates by turns": Trial("ternary", turns=2),
    "sign, half of the coordinates by turns": Trial("sign", turns=2),
    "largest of 7, its mean in signs": Trial("largest_of_7", "sign"),
    "signs, their mean as largest of 7": Trial("sign", "largest_of_7"),
    "largest of 7, what the mean loses waits": Trial("largest_of_7", mean_waits=1.0),
    "largest of 7, half of it waits": Trial("largest_of_7", mean_waits=0.5),
    "largest of 7, nothing forgotten": Trial("largest_of_7", forgotten=0.0),
    "largest of 7, all that may be forgotten": Trial("largest_of_7", forgotten=1.0),
    "largest of 7, b2 0.98": Trial("largest_of_7", b2=0.98),
    "largest of 7, b1 0.9": Trial("largest_of_7", b1=0.9),
    "largest of 7, b1 0.6 before and 0.5 after": Trial(
        "largest_of_7", b1=0.6, after=0.5
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    only: tuple[str, ...] = tuple(TRIALS)
    task: str = "byte_lm"
    """byte_lm_apart has files of their own for each of eight workers"""
    workers: int = 8
    batch: int = 8
    """sequences of each worker"""
    steps: int = 300
    rates: tuple[float, ...] = (0.008,)
    seeds: tuple[int, ...] = (0,)
    out: Path = RESULTS.parent
    """where fewer_bytes.jsonl is, or will be: elsewhere all is run anew"""


class Leaves:
    """Where the leaves of a tree lie in the vector of all parameters."""

    def __init__(self, params: optax.Params) -> None:
        self.sizes = [x.size for x in jax.tree.leaves(params)]
        self.starts = np.cumsum([0, *self.sizes])
        self.number = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self.within = np.arange(self.starts[-1]) - self.starts[self.number]

    def mean(self, x: jax.Array) -> jax.Array:
        """Of each element the mean of its leaf."""
        totals = jax.ops.segment_sum(x, self.number, len(self.sizes))
        return (totals / np.asarray(self.sizes, np.float32))[self.number]

    def sent(self, x: jax.Array, payload: str | None, due: np.ndarray) -> jax.Array:
        """What the codes of (n, elements) stand for; zero where they are not due."""
        quantizer, out = quantizer_of(payload), jnp.zeros_like(x)
        for i in range(len(self.sizes)):
            places = due[self.starts[i] <= due]
            places = places[places < self.starts[i + 1]]
            y = x[:, places]
            if quantizer is not None:
                group = quantizer.group_of(len(places))
                count = -(-len(places) // group.size)
                pad = (0, 0), (0, count * group.size - len(places))
                groups = jnp.pad(y, pad).reshape(-1, *group[1:])
                coded = quantizer.encode(groups, jnp.uint32(0))
                y = quantizer.decode(*coded).reshape(len(x), -1)[:, : len(places)]
            out = out.at[:, places].set(y)
        return out


def step_of(trial: Trial, leaves: Leaves) -> Callable[..., Any]:
    """A step: state, the workers' gradients, t and the rate to the next state."""
    down = trial.up if trial.down == "" else trial.down
    turn_of = leaves.within % trial.turns
    turns = [np.flatnonzero(turn_of == i) for i in range(trial.turns)]

    def sent(x: jax.Array, payload: str | None, t: jax.Array) -> jax.Array:
        send = functools.partial(leaves.sent, payload=payload)
        of_turn = [functools.partial(send, due=due) for due in turns]
        return jax.lax.switch(t % trial.turns, of_turn, x)

    def step(state: Any, g: jax.Array, t: jax.Array, rate: jax.Array) -> Any:
        params, m, later, v = state
        b1, first = trial.b1, t == 1
        fix = 1 - b1 ** t.astype(jnp.float32)
        x = (b1 * m + (1 - b1) * g) / fix
        before = jnp.where(first, 1.0, 1 - trial.b2 ** (t - 1).astype(jnp.float32))
        root = jnp.sqrt(v / before)
        unit = root + 0.05 * jnp.sqrt(leaves.mean(v / before))
        unit = jnp.where(first | (unit == 0), 1.0, unit)
        q = sent(x / unit, trial.up, t)
        mean = q.mean(0, keepdims=True)
        received = sent(mean, down, t)
        error = (x / unit - q) * unit
        n = len(g)
        owner = np.arange(v.size) * n // v.size == np.arange(n)[:, None]
        error += trial.mean_waits * n * owner * ((mean - received) * unit)
        due = turn_of == t % trial.turns
        waits = 1 - jnp.where(first | ~due, 0.0, trial.forgotten * root / unit)
        m = fix * (x + waits * (1 - b1) / b1 * error)
        later = trial.after * later + (1 - trial.after) * received[0] * unit
        taken = later / (1 - trial.after ** t.astype(jnp.float32))
        v = trial.b2 * v + (1 - trial.b2) * taken**2
        v_hat = v / (1 - trial.b2 ** t.astype(jnp.float32))
        return params - rate * taken / (jnp.sqrt(v_hat) + 1e-8), m, later, v

    return step


@functools.lru_cache(maxsize=1)
def program(
    name: str, of_task: str, workers: int, steps: int
) -> Callable[..., jax.Array]:
    """A whole run: parameters, batches and rates to the evaluation loss."""
    of = task(of_task)
    shapes = jax.eval_shape(of.init, jax.random.key(0))
    _, tree_of = ravel_pytree(
        jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    )
    step = step_of(TRIALS[name], Leaves(shapes))

    def gradients(params: jax.Array, batch: jax.Array) -> jax.Array:
        def gradient(batch: jax.Array) -> jax.Array:
            return jax.grad(lambda x: of.loss(tree_of(x), batch))(params)

        each = len(batch) // workers
        batch = batch.reshape(-1, TOGETHER, each, *batch.shape[1:])
        return jax.lax.map(jax.vmap(gradient), batch).reshape(workers, -1)

    def run(params: jax.Array, batches: jax.Array, rates: jax.Array) -> jax.Array:
        def body(state: Any, now: Any) -> tuple[Any, None]:
            t, rate, batch = now
            return step(state, gradients(state[0], batch), t, rate), None

        zeros = jnp.zeros_like(params)
        state = params, jnp.zeros((workers, params.size)), zeros, zeros
        state, _ = jax.lax.scan(body, state, (jnp.arange(1, steps + 1), rates, batches))
        return of.loss(tree_of(state[0]), of.held_out)

    return jax.jit(run)


def loss(name: str, rate: float, seed: int, config: Config) -> float:
    """The evaluation loss in the end."""
    of, workers, steps = task(config.task), config.workers, config.steps
    params, _ = ravel_pytree(of.init(jax.random.key(seed)))
    batches = np.stack(list(of.batches(workers * config.batch, steps, seed)))
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 10, steps)
    rates = rate * np.array([shape(t) for t in range(steps)], np.float32)
    return float(program(name, config.task, workers, steps)(params, batches, rates))


def energy_left() -> list[dict[str, str]]:
    """Of normal numbers in codes: bits each, and the energy of what rounding takes."""
    x, rows = jax.random.normal(jax.random.key(0), (2**20,)), []
    for payload in CODES:
        quantizer = quantizer_of(payload)
        assert quantizer is not None
        group = quantizer.group_of(x.size)
        groups = x[: x.size // group.size * group.size].reshape(-1, *group[1:])
        y = quantizer.decode(*quantizer.encode(groups, jnp.uint32(0)))
        bits = 8 * quantizer.nbytes(group._replace(groups=len(groups))) / groups.size
        left = jnp.sum((groups - y) ** 2) / jnp.sum(groups**2)
        row = {"": payload, "bits": f"{bits:.2f}", "left": f"{left:.3f}"}
        rows.append(row | {"the least, by Shannon": f"{2 ** (-2 * bits):.3f}"})
    return rows


def main(config: Config) -> None:
    check_names("--only", config.only, tuple(TRIALS))
    check_names("--task", (config.task,), tuple(TASKS))
    if config.workers < 1 or config.workers % TOGETHER:
        raise SystemExit(f"--workers: {config.workers} is no multiple of {TOGETHER}")
    results, rows = Results(config.out / RESULTS.name), []
    for name in config.only:
        for rate in config.rates:
            losses = []
            for seed in config.seeds:
                key = {
                    "trial": name, "task": config.task, "workers": config.workers,
                    "batch": config.batch, "steps": config.steps, "rate": rate,
                    "seed": seed,
                }  # fmt: skip
                run = functools.partial(loss, name, rate, seed, config)
                losses.append(results.once(key, run))
            row = {"": name, "rate": f"{rate:g}", "loss": spread(losses)}
            rows.append(row)
    seeds = ", ".join(map(str, config.seeds))
    caption = (
        f"{config.task}, {config.workers} workers x {config.batch}, {config.steps} "
        f"steps, seeds {seeds}; {hardware(jax.devices()[0])}"
    )
    console = Console(width=100)
    console.print(table("Fewer bytes", rows, caption))
    console.print(table("Normal numbers in codes", energy_left()))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
