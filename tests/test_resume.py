"""Watchdogs, and runs of four processes that are killed and lose nothing."""

import json
import random
import re
import sys
import threading
import time
import types

import jax
import pytest
from jax._src import distributed

import slamb_jax
from slamb_jax.workers.watchdog import _from_exchange
from tests.programs import resumable

N = 4
TIMEOUT = 15.0  # seconds without a sign of life; a busy machine may pause for several


def to_the_end(directory, **options):
    """The last states of a run that nobody interrupts."""
    with resumable(directory, N, **options) as run:
        assert run.statuses() == [0] * N, run.told()
        return [end for *_, end in run.found()]


def others(values, gone):
    return [x for i, x in enumerate(values) if i != gone]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fail", "said"),
    [
        ("2:4:stop", "process 2 has given no sign of life"),
        ("1:4:hang", "process 1 has been at step 3 .* behind the others"),
        ("3:4:raise", r"process 3 failed: RuntimeError\('the disk"),
        ("0:4:stop", "process 0.*died or was stopped"),
        ("0:4:kill", "process 0|leader"),
    ],
)
def test_other_ends_of_a_worker(fail, said, tmp_path):
    gone = int(fail[0])
    options = {"timeout": TIMEOUT, "step-timeout": 2 * TIMEOUT, "fail": fail}
    with resumable(tmp_path / "run", N, **options) as run:
        statuses = run.statuses(but=gone)
        allowed = {75, -6} if fail == "0:4:kill" else {75}  # -6: by jax itself
        assert set(statuses) <= allowed, run.told()
        for told in others(run.told(), gone):
            assert re.search(said, told), told


# Of each five launches two are killed in a save, two at a step, and of one a single
# process. No run ends at an averaging step, so that its replicas differ.
KINDS = ("in a save", "one worker", "at a step", "in a save", "at a step")
RUNS = [pytest.param(0, KINDS[:3], 19, id="three_kills")]
RUNS += [pytest.param(seed, KINDS * 2, 51, id=f"ten_kills_{seed}") for seed in range(5)]


@pytest.mark.long
@pytest.mark.parametrize(("seed", "kinds", "steps"), RUNS)
def test_killed_it_ends_as_if_it_had_not_been(seed, kinds, steps, tmp_path):
    options = {"steps": steps, "timeout": TIMEOUT}
    want = to_the_end(tmp_path / "straight", **options)
    rng, directory, at = random.Random(seed), tmp_path / "killed", 0
    for kind in kinds:
        with resumable(directory, N, **options) as run:
            if kind == "in a save":
                ready = run.until(f"saving {at + 3 * rng.choice((1, 2))}")
            else:
                ready = run.until(f"step {at + rng.randint(1, 5)}")
            assert ready, run.told()
            time.sleep(rng.uniform(0.0, 0.25 if kind == "in a save" else 0.05))
            one = [rng.randrange(1, N)] if kind == "one worker" else []
            run.kill(*one)
            statuses = run.statuses()
            if one:  # the others ended by themselves, and named it
                assert others(statuses, one[0]) == [75] * 3, run.told()
                said = rf"process {one[0]} has given no sign of life .*step \d+\)"
                assert all(re.search(said, x) for x in others(run.told(), one[0]))
            assert "is damaged" not in run.told()[0]
        complete = (directory / "checkpoints").glob("*/_CHECKPOINT_METADATA")
        saved = [int(x.parent.name) for x in complete if x.parent.name.isdecimal()]
        at = max([at, *saved])
    for got, end in zip(to_the_end(directory, **options), want, strict=True):
        assert {k: x for k, x in got.items() if x != end[k]} == {}
        assert got.keys() == end.keys()
    w1 = {str(end["[0]['w1']"]) for end in want}
    assert len(w1) == N  # the replicas differ, and each came back as it was


def test_alone_it_starts_nothing():
    before = threading.active_count()
    with slamb_jax.Watchdog(timeout=30) as dog:
        dog.beat(0)
        assert threading.active_count() == before


@pytest.mark.parametrize("missing", ["client", "key_value_dir_get", "module"])
def test_it_says_what_broke_when_jax_has_changed(missing, monkeypatch):
    """With several processes the private client is looked for, and checked."""
    client = types.SimpleNamespace(key_value_set=print)
    state = types.SimpleNamespace(client=None if missing == "client" else client)
    monkeypatch.setattr(distributed, "global_state", state)
    if missing == "module":
        monkeypatch.setitem(sys.modules, "jax._src.distributed", None)
        monkeypatch.delattr(jax._src, "distributed", raising=False)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    said = r"no coordination client in jax .*jax\._src\.distributed"
    with pytest.raises(RuntimeError, match=said):
        slamb_jax.Watchdog(timeout=30)


# The error of a save during which another process was killed.
BROKE_OFF = OSError("checkpoint 15 could not be written")
BROKE_OFF.__cause__ = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed")


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: connection reset"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: the other end is gone"), True),
        (ValueError("b1 must be in [0, 1), got 2"), False),
        (RuntimeError("UNKNOWN: a user's own"), False),
        (OSError("checkpoint 15 could not be written"), False),
        (BROKE_OFF, True),
    ],
)
def test_a_broken_exchange_is_told_from_a_failure(error, broken):
    assert _from_exchange(error) is broken


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (SystemExit(0), "is done"),
        (SystemExit(), "is done"),
        (SystemExit(143), "is done"),  # as the guide's loop stops on SIGTERM
        (SystemExit(3), "failed: SystemExit(3)"),
        (KeyboardInterrupt(), "failed: KeyboardInterrupt()"),
    ],
)
def test_to_exit_with_0_or_143_is_no_failure(error, state):
    written = []
    watchdog = slamb_jax.Watchdog(timeout=15)
    watchdog._client = types.SimpleNamespace(
        key_value_set=lambda key, value, **_: written.append(json.loads(value))
    )
    watchdog.__exit__(type(error), error, None)
    assert [sign["state"] for sign in written] == [state]
