"""Runs of four processes that are killed, stop or hang, and lose nothing."""

import random
import re
import signal
import time

import pytest

from tests.programs import resumable

N = 4
TIMEOUT = 15  # seconds without a heartbeat; a busy machine may pause for several
# Of a process that jax ends since another one's heartbeats are missing: jax 0.8 exits.
BY_JAX = {-signal.SIGABRT, 1}


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
        ("2:4:stop", r"unhealthy \(stopped sending heartbeats\):\n.*2\n"),
        ("1:4:hang", r"Timeout(.*\n)*.*in block_until_ready"),
        ("3:4:raise", r"ask[ :]3 heartbeat timeout|heartbeats\):\n.*3\n"),
        ("0:4:stop", r"DEADLINE_EXCEEDED(.*\n)*.*Heartbeat"),
        ("0:4:kill", "coordination service"),
    ],
)
def test_other_ends_of_a_worker(fail, said, tmp_path):
    gone, how = int(fail[0]), fail[4:]
    of_the_lost = {"hang": r"Timeout(.*\n)*.*misbehave", "raise": "Error: the disk of"}
    options = {"timeout": TIMEOUT, "step-timeout": 2 * TIMEOUT, "fail": fail}
    with resumable(tmp_path / "run", N, **options) as run:
        statuses = run.statuses(but=gone)
        assert set(statuses) <= BY_JAX, run.told()
        told = run.told()
        assert all(re.search(said, x) for x in others(told, gone)), told
        if how in of_the_lost:  # it ends too, and says where it was
            assert run.processes[gone].wait(600) == 1
            assert re.search(of_the_lost[how], told[gone]), told


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
                assert {*others(statuses, one[0])} <= BY_JAX, run.told()
                said = rf"ask[ :]{one[0]} heartbeat timeout|heartbeats\):\n.*{one[0]}\n"
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
