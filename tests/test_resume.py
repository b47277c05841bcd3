"""Runs of four processes that are killed and started again: nothing is lost."""

import json
import random
import re
import time

import jax
import pytest

from slamb_jax.workers.watchdog import Watchdog, _from_exchange
from tests.launcher import Launch

N = 4
TIMEOUT = 6.0  # a busy machine may pause for three


def ends(directory):
    return [json.loads((directory / f"end-{i}.json").read_text()) for i in range(N)]


def straight(directory, **options):
    """The run that nobody interrupts."""
    with Launch(directory, N, **options) as run:
        assert run.statuses() == [0] * N, run.told()
    return ends(directory)


def check_same(got, want):
    assert [sorted(e) for e in got] == [sorted(e) for e in want]
    for i in range(N):
        for name in want[i]:
            assert got[i][name] == want[i][name], (i, name)
    w1 = [e["[0]['w1']"] for e in want]
    assert len(set(w1)) == N  # replicas had drifted apart: each came back as it was


def test_a_watch_that_fails_once_goes_on(capsys):
    watchdog, times = Watchdog(timeout=0.05), []

    def work():
        times.append(time.monotonic())
        if len(times) == 1:
            raise KeyError("surprise")
        watchdog._stop.set()

    watchdog._repeat(work)
    assert len(times) == 2
    assert "KeyError: 'surprise'" in capsys.readouterr().err


def others(statuses, gone):
    return [s for i, s in enumerate(statuses) if i != gone]


def check_named(run, gone):
    """The others ended by themselves, and said who was gone."""
    for i, told in enumerate(run.told()):
        said = rf"process {gone} has given no sign of life .*last at step \d+\)"
        assert i == gone or re.search(said, told), told


@pytest.mark.long
def test_killed_and_torn_it_ends_as_if_it_had_not_been(tmp_path):
    options = {"steps": 11, "timeout": TIMEOUT}
    want = straight(tmp_path / "straight", **options)
    directory = tmp_path / "killed"
    with Launch(directory, N, **options) as run:  # all at once, in a save
        assert run.until("saving 6")
        time.sleep(0.02)
        run.kill()
    with Launch(directory, N, **options, fail="2:8:kill") as run:
        assert run.until("step 7")
        started = time.monotonic()
        statuses = run.statuses()
        assert time.monotonic() - started < 4 * TIMEOUT  # and the machine may be busy
        assert statuses[2] == -9
        assert others(statuses, 2) == [75] * 3, run.told()
        check_named(run, 2)
    with Launch(directory, N, **options) as run:
        assert run.until("resumed 6"), run.told()
        assert run.statuses() == [0] * N, run.told()
    check_same(ends(directory), want)


@pytest.mark.parametrize(
    ("fail", "gone", "said"),
    [
        ("2:4:stop", 2, r"process 2 has given no sign of life"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("1:4:hang", 1, r"process 1 has been at step 3 .* behind the others"),
                ("3:4:raise", 3, r"process 3 failed: RuntimeError\('the disk"),
                ("0:4:stop", 0, "process 0.*died or was stopped"),
                ("0:4:kill", 0, "process 0|leader"),
            )
        ),
    ],
)
def test_other_ends_of_a_worker(fail, gone, said, tmp_path):
    options = {"timeout": TIMEOUT, "step_timeout": 2 * TIMEOUT, "fail": fail}
    with Launch(tmp_path / "run", N, **options) as run:
        alive = [i for i in range(N) if i != gone]
        statuses = run.statuses(90, waiting_for=alive)
        allowed = {75, -6} if fail == "0:4:kill" else {75}  # -6: by jax itself
        assert set(statuses) <= allowed
        for i in alive:
            assert re.search(said, run.told()[i]), run.told()[i]


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: connection reset"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: the other end is gone"), True),
        (ValueError("b1 must be in [0, 1), got 2"), False),
        (RuntimeError("UNKNOWN: a user's own"), False),
    ],
)
def test_a_broken_exchange_is_told_from_a_failure(error, broken):
    assert _from_exchange(error) is broken


STEPS, KILLS = 51, 10  # does not end at an averaging step: replicas differ


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_ten_kills(seed, tmp_path):
    """Of each five launches two are killed in a save, two at a step, one in part."""
    options = {"steps": STEPS, "timeout": TIMEOUT}
    want = straight(tmp_path / "straight", **options)
    rng = random.Random(seed)
    directory = tmp_path / "killed"
    tally = {"in a save": 0, "at a step": 0, "one worker": 0, "torn": 0}
    at, started = 0, time.monotonic()
    for k in range(KILLS):
        with Launch(directory, N, **options) as run:
            kind = ("in a save", "at a step", "one worker", "in a save", "at a step")[
                k % 5
            ]
            if kind == "in a save":
                ready = run.until(f"saving {at + 3 * rng.choice((1, 2))}")
            else:
                ready = run.until(f"step {at + rng.randint(1, 5)}")
            assert ready, run.told()
            time.sleep(rng.uniform(0.0, 0.25 if kind == "in a save" else 0.05))
            one = [rng.randrange(1, N)] if kind == "one worker" else []
            run.kill(*one)
            statuses = run.statuses()
            assert not one or others(statuses, one[0]) == [75] * 3, run.told()
            tally[kind] += 1
            tally["torn"] += "was cut short" in run.told()[0]
            assert "is damaged" not in run.told()[0]
            print(f"\n{k}: {kind}, from step {at}, {statuses}", end="", flush=True)
        whole = [int(p.name) for p in (directory / "checkpoints").glob("*[0-9]")]
        at = max([at, *(s for s in whole if whole_checkpoint(directory, s))])
    with Launch(directory, N, **options) as run:
        assert run.statuses() == [0] * N, run.told()
    check_same(ends(directory), want)
    print(f"\nseed {seed}: {tally}, {time.monotonic() - started:.0f} s")


def whole_checkpoint(directory, step):
    return (directory / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").exists()
