"""A step of AdamW on one vector of all parameters, by what its codes stand for."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.fewer_bytes.codes import CODES
from benchmarks.fewer_bytes.trials import Trial

# (n, elements) that each worker sent; (1, elements) of their mean, and of it as it is
# received; the bases of the next step.
Sent: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]


class Leaves:
    """Where the leaves of a tree lie in the vector of all parameters."""

    def __init__(self, params: optax.Params) -> None:
        shapes = [x.shape for x in jax.tree.leaves(params)]
        self.sizes = [int(np.prod(shape)) for shape in shapes]
        self.starts = np.cumsum([0, *self.sizes])
        self.number = np.repeat(np.arange(len(self.sizes)), self.sizes)
        self.within = np.arange(self.starts[-1]) - self.starts[self.number]
        self.matrices = [_as_matrix(shape) for shape in shapes]

    def mean(self, x: jax.Array) -> jax.Array:
        """Of each element the mean of its leaf."""
        totals = jax.ops.segment_sum(x, self.number, len(self.sizes))
        return (totals / np.asarray(self.sizes, np.float32))[self.number]

    def sent(self, x: jax.Array, payload: str | None, due: np.ndarray) -> jax.Array:
        """What the codes of (n, elements) stand for; zero where they are not due."""
        out = jnp.zeros_like(x)
        for i in range(len(self.sizes)):
            places = due[self.starts[i] <= due]
            places = places[places < self.starts[i + 1]]
            y = x[:, places]
            if payload is not None and len(places):
                y = CODES[payload].stands_for(y)
            out = out.at[:, places].set(y)
        return out


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The most nearly square matrix of this shape; None if it has under 32 rows."""
    ways = [
        (int(np.prod(shape[:i])), int(np.prod(shape[i:]))) for i in range(1, len(shape))
    ]
    best = max(ways, key=min, default=(0, 0))
    return best if min(best) >= 32 else None


class State(NamedTuple):
    """Of the run."""

    params: jax.Array
    m: jax.Array  # (n, elements): each worker's momentum, with what waits
    later: jax.Array  # a momentum after the exchange
    v: jax.Array
    told: jax.Array  # (n, elements): what each worker sent last
    heard: jax.Array  # their mean as it was received
    bases: list[jax.Array]  # of the low ranks, (columns, rank) for each matrix


def first_state(params: jax.Array, workers: int, trial: Trial, leaves: Leaves) -> State:
    zeros, each = jnp.zeros_like(params), jnp.zeros((workers, params.size))
    bases = [
        jax.random.normal(jax.random.key(i), (shape[1], trial.rank))
        for i, shape in enumerate(leaves.matrices)
        if shape is not None and trial.rank
    ]
    return State(params, each, zeros, zeros, each, zeros, bases)


def in_codes(trial: Trial, leaves: Leaves) -> Callable[..., Sent]:
    """What is sent of (n, elements) in codes, up and down."""
    down = trial.up if trial.down == "" else trial.down
    turn_of = leaves.within % trial.turns
    turns = [np.flatnonzero(turn_of == i) for i in range(trial.turns)]

    def code(x: jax.Array, payload: str | None, t: jax.Array) -> jax.Array:
        of_turn = [lambda x, due=due: leaves.sent(x, payload, due) for due in turns]
        return jax.lax.switch(t % trial.turns, of_turn, x)

    def send(
        x: jax.Array, told: jax.Array, heard: jax.Array, bases: Any, t: jax.Array
    ) -> Sent:
        expected, of_mean = trial.predicted * told, trial.predicted * heard
        q = expected + code(x - expected, trial.up, t)
        mean = q.mean(0, keepdims=True)
        return q, mean, of_mean + code(mean - of_mean, down, t), bases

    return send


def in_low_rank(trial: Trial, leaves: Leaves) -> Callable[..., Sent]:
    """What is sent of matrices as products of thin ones, and of the rest in codes.

    ``compressors.low_rank`` takes the last dimension as columns, so that kernels of
    attention are 256 x 16 there; here they are 64 x 64.
    """
    matrices = leaves.matrices
    others = np.flatnonzero([matrices[i] is None for i in leaves.number])

    def send(
        x: jax.Array, told: jax.Array, heard: jax.Array, bases: Any, t: jax.Array
    ) -> Sent:
        del told, heard, t
        q, new, bases = leaves.sent(x, trial.up, others), [], iter(bases)
        mean = q.mean(0, keepdims=True)
        received = leaves.sent(mean, trial.up, others)
        for i, shape in enumerate(matrices):
            if shape is None:
                continue
            place = slice(leaves.starts[i], leaves.starts[i + 1])
            each = x[:, place].reshape(-1, *shape)
            rows, _ = jnp.linalg.qr((each @ next(bases)).mean(0))
            columns = jnp.swapaxes(each, 1, 2) @ rows  # a worker's own
            new.append(columns.mean(0))
            own = rows @ jnp.swapaxes(columns, 1, 2)
            q = q.at[:, place].set(own.reshape(len(x), -1))
            received = received.at[0, place].set((rows @ new[-1].T).ravel())
        return q, received, received, new

    return send


def step_of(trial: Trial, leaves: Leaves) -> Callable[..., State]:
    """A step: state, the workers' gradients, t and the rate to the next state."""
    send = (in_low_rank if trial.rank else in_codes)(trial, leaves)

    def step(state: State, g: jax.Array, t: jax.Array, rate: jax.Array) -> State:
        params, m, later, v, told, heard, bases = state
        b1, first = trial.b1, t == 1
        fix = 1 - b1 ** t.astype(jnp.float32)
        x = (b1 * m + (1 - b1) * g) / fix
        before = jnp.where(first, 1.0, 1 - trial.b2 ** (t - 1).astype(jnp.float32))
        root = jnp.sqrt(v / before)
        unit = root + 0.05 * jnp.sqrt(leaves.mean(v / before))
        unit = jnp.where(first | (unit == 0), 1.0, unit)
        q, mean, received, bases = send(x / unit, told / unit, heard / unit, bases, t)
        error = (x / unit - q) * unit
        n = len(g)
        owner = np.arange(v.size) * n // v.size == np.arange(n)[:, None]
        error += trial.mean_waits * n * owner * ((mean - received) * unit)
        due = leaves.within % trial.turns == t % trial.turns
        waits = 1 - jnp.where(first | ~due, 0.0, trial.forgotten * root / unit)
        m = fix * (x + waits * (1 - b1) / b1 * error)
        heard = received[0] * unit
        later = trial.after * later + (1 - trial.after) * heard
        taken = later / (1 - trial.after ** t.astype(jnp.float32))
        v = trial.b2 * v + (1 - trial.b2) * taken**2
        v_hat = v / (1 - trial.b2 ** t.astype(jnp.float32))
        params -= rate * taken / (jnp.sqrt(v_hat) + 1e-8)
        return State(params, m, later, v, q * unit, heard, bases)

    return step
