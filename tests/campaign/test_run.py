"""A run in which anything may happen, against a model of what is on the disk."""

import dataclasses
import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

import slamb_jax
from slamb_jax.exchange.selections import Strided
from tests.campaign.draws import SEED, chosen
from tests.close import assert_agree_but, assert_same_bits
from tests.damage import DAMAGE
from tests.optimizers import (
    any_lamb,
    random_tree,
    standard_promotion,
    step_on_gradients,
)
from tests.workers import AXIS

SHAPES = {"w": (6, 8), "b": (8,)}
OUTER = {"sync_every": 2, "outer": optax.sgd(0.7, momentum=0.5)}
PAPER = {"payload": None, "sync_every": 2, "selection": Strided(0.25, min_size=0)}
EXCHANGES = {  # of each kind the last one exchanges other things, or at other steps
    "mean": ({}, {"payload": "uniform8"}, {"route": "all"}),
    "outer": (OUTER, OUTER | {"payload": "uniform8"}, OUTER | {"sync_every": 3}),
    "selection": (
        PAPER,
        PAPER | {"payload": "uniform8"},
        PAPER | {"selection": Strided(0.25, min_size=0, seed=1)},
    ),
}  # fmt: skip
EXTRA = {"position": 1120}
WORKERS, WHICH = st.sampled_from([1, 2, 3, 4]), st.sampled_from([0, 1, 2])


@functools.cache
def stepper(kind, which, n):
    exchange = slamb_jax.Exchange(AXIS, **EXCHANGES[kind][which])
    tx = slamb_jax.skip_not_finite(any_lamb(0.05, exchange), exchange)
    step = slamb_jax.simulated_step(step_on_gradients(tx), n, exchange)
    return tx, step


def bits(state):
    return jax.tree.map(np.array, state)


@dataclasses.dataclass
class Saved:
    """A checkpoint as it should be on the disk."""

    n: int
    state: Any
    sound: bool = True
    tells_n: bool = True  # even if its arrays are damaged


class Run(stateful.RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.directory = Path(self.folder.name) / "run"
        self.writer = None
        self.disk = {}
        self.seen_damaged = set()  # by the writer, which moves them aside
        self.saving, self.t = False, 0  # whether it holds the directory; last number

    @stateful.initialize(
        n=WORKERS, kind=st.sampled_from(sorted(EXCHANGES)), which=WHICH
    )
    def begin(self, n, kind, which):
        self.n, self.kind, self.which = n, kind, which
        params = random_tree(SHAPES, 0)
        tx, _ = stepper(kind, which, n)
        self.state = slamb_jax.simulated_replicas((params, tx.init(params)), n)

    def advance(self, grads):
        with standard_promotion():
            step = stepper(self.kind, self.which, self.n)[1]
            self.state, _ = step(self.state, grads)

    def checkpoints(self):
        return slamb_jax.Checkpoints(self.directory)

    @rule(seed=st.integers(0, 99))
    def step(self, seed):
        count = self.state[1].inner[0].count + 1
        self.advance(random_tree(SHAPES, seed, self.n))
        after = self.state[1].inner[0].count, self.state[1].notfinite_count
        chex.assert_trees_all_equal(after, (count, jnp.zeros_like(count)))

    @rule(data=st.data(), value=st.sampled_from([np.nan, np.inf, 1e30]))
    def poison(self, data, value):
        worker = data.draw(st.integers(0, self.n - 1))
        grads = random_tree(SHAPES, 0, self.n)
        grads["w"] = grads["w"].at[worker, 2, 3].set(value)
        params, opt_state = bits(self.state)
        self.advance(grads)
        assert_same_bits(self.state[0], params)
        assert_same_bits(self.state[1].inner, opt_state.inner)
        counted = self.state[1].total_notfinite
        chex.assert_trees_all_equal(counted, opt_state.total_notfinite + 1)

    @rule()
    def save(self):
        self.t += 1
        self.opened().save(self.t, self.state, EXTRA)
        self.saving = True
        kept = {t: x for t, x in self.disk.items() if t not in self.seen_damaged}
        kept[self.t] = Saved(self.n, bits(self.state))
        self.disk, self.seen_damaged = dict(sorted(kept.items())[-2:]), set()

    def opened(self):
        self.writer = self.writer or self.checkpoints()
        return self.writer

    @rule(during_a_save=st.booleans())
    def kill(self, during_a_save):
        """Nothing of the process is left; what it was writing is half there."""
        self.close()
        if during_a_save:
            cut = self.directory / f"{self.t + 1}.orbax-checkpoint-tmp"
            (cut / "state").mkdir(parents=True, exist_ok=True)

    def close(self):
        if self.writer is not None:
            self.writer.close()
        self.writer, self.saving, self.seen_damaged = None, False, set()

    @precondition(lambda self: any(x.sound for x in self.disk.values()))
    @rule(data=st.data(), how=st.sampled_from(sorted(DAMAGE)))
    def damage(self, data, how):
        """What a process wrote it may remember: it is another that reads it."""
        self.close()
        step = data.draw(st.sampled_from([t for t, x in self.disk.items() if x.sound]))
        DAMAGE[how](self.directory / str(step))
        self.disk[step].sound = False
        self.disk[step].tells_n = how in ("flip", "truncate", "remove", "lie")

    @rule()
    def restore(self):
        state, skipped = self.restored(self.opened())
        self.seen_damaged |= skipped
        self.state = self.state if state is None else state

    def restored(self, checkpoints):
        """What comes back, which is what the model says, and what was damaged."""
        steps = sorted(self.disk, reverse=True)
        heard = [
            step
            for step in steps
            if (x := self.disk[step]).sound or (x.tells_n and x.n != self.n)
        ]
        skipped = {s for s in steps if s > max(heard, default=-1)}
        latest = self.disk[heard[0]] if heard else None
        refusal = "all are kept" if latest is None and skipped else ""
        if latest is not None and latest.n != self.n:
            refusal = f"{latest.n} workers"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if refusal:
                with pytest.raises(ValueError, match=refusal):
                    checkpoints.restore(self.state)
                return None, set()
            found = checkpoints.restore(self.state)
        messages = [str(w.message) for w in caught if "checkpoint" in str(w.message)]
        assert len(messages) == len(skipped), messages
        if latest is None:
            assert found is None
            return None, set()
        assert (found.step, found.extra) == (heard[0], EXTRA)
        assert_same_bits(found.state, latest.state)
        return found.state, skipped

    @precondition(lambda self: self.writer is not None and self.disk)
    @rule()
    def another_process(self):
        """It may read what the run has saved, and not save where the run does."""
        with self.checkpoints() as reader:
            self.restored(reader)
            if self.saving:
                with pytest.raises(OSError, match="another run is saving"):
                    reader.save(self.t + 1, self.state)

    @rule(m=WORKERS)
    def resize(self, m):
        before = self.state[0]
        self.state, self.n = slamb_jax.checkpoint.resize(self.state, m), m
        means = jax.tree.map(lambda x: np.mean(x, 0), (self.state[0], before))
        chex.assert_trees_all_close(*means, rtol=0, atol=1e-6)

    @rule(which=WHICH)
    def change_the_exchange(self, which):
        self.close()
        self.which = which

    @invariant()
    def replicas_agree_where_they_should(self):
        if hasattr(self, "state"):
            chex.assert_tree_all_finite(self.state)
            assert_agree_but(self.state, ["mu"], drifts=self.kind != "mean")

    @invariant()
    def the_directory_holds_what_was_saved(self):
        there = self.directory.iterdir() if self.directory.is_dir() else ()
        numbered = {int(p.name) for p in there if p.name.isdigit()}
        assert numbered == set(self.disk)

    def teardown(self):
        self.close()
        self.folder.cleanup()


TestRun = hypothesis.seed(SEED)(Run.TestCase)
TestRun.settings = hypothesis.settings(chosen(3, 40), stateful_step_count=14)
