"""Snapshots: each process goes on with its own workers, and a newcomer with a copy."""

import contextlib
import signal
from pathlib import Path
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slamb_jax.checkpoint import Snapshots
from slamb_jax.checkpoint.snapshots import _agreed, _read
from tests.close import assert_same_bits
from tests.damage import tear
from tests.programs import resumable
from tests.test_checkpoint import a_state, assert_restored

N = 4
EXTRA = {"position": 1120}


def saved(directory, state, *steps):
    snapshots = Snapshots(directory)
    assert snapshots.restore(state) is None
    for step in steps:
        snapshots.save(step, state, EXTRA)


def kept(directory):
    return sorted(path.stem for path in directory.glob("*.snapshot"))


def a_folder(path):
    (path / "inner").mkdir(parents=True)


def renamed(path):
    (path.parent / "6.snapshot").rename(path)


def foreign_arrays(path):
    with path.open("wb") as file:
        np.savez(file, x=1)


UNREAD = {  # the file, what happens to it, and what is read then
    "torn": ("6.snapshot", lambda path: path.write_bytes(tear(path.read_bytes())), 3),
    "empty": ("6.snapshot", lambda path: path.write_bytes(b""), 3),
    "null": ("6.snapshot", lambda path: path.write_bytes(b"null\n"), 3),
    "renamed": ("9.snapshot", renamed, 3),
    "a link to itself": ("9.snapshot", lambda path: path.symlink_to(path), 6),
    "arrays of another": ("9.snapshot", foreign_arrays, 6),
    "no number": ("abc.snapshot", Path.touch, 6),
    "partial": ("partial.npz", a_folder, 6),
}


@pytest.mark.parametrize(("name", "change", "step"), UNREAD.values(), ids=UNREAD)
def test_what_is_damaged_or_foreign_does_not_hide_what_is_sound(
    name, change, step, tmp_path
):
    state = a_state()
    saved(tmp_path, state, 3, 6)
    change(tmp_path / name)
    silent = name in ("abc.snapshot", "partial.npz")
    told = pytest.warns(UserWarning, match=rf"{name} is damaged .* and is ignored")
    snapshots = Snapshots(tmp_path)
    with contextlib.nullcontext() if silent else told:
        assert_restored(snapshots.restore(state), step, state, extra=EXTRA)
    for step in (7, 9, 11, 10):  # the last of another history
        snapshots.save(step, state)
    assert kept(tmp_path) == sorted(["10", "9"] + ["abc"] * (name == "abc.snapshot"))
    del snapshots
    assert Snapshots(tmp_path).restore(state).step == 10


def test_a_save_that_fails_leaves_nothing(tmp_path):
    state = {"w": jnp.ones((N, 3))}
    saved(tmp_path, state, 3)
    snapshots = Snapshots(tmp_path)
    assert snapshots.restore(state).step == 3

    def full(path, **arrays):
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    said = "snapshot 4 of 12 bytes was not written into"
    with mock.patch("numpy.savez", full), pytest.raises(OSError, match=said):
        snapshots.save(4, state)
    assert kept(tmp_path) == ["3"]
    assert len([*tmp_path.iterdir()]) == 2  # it, and the empty file of the job


def test_whichever_bit_is_flipped_nothing_else_is_read(tmp_path):
    state = {"w": jnp.arange(8.0).reshape(2, 4), "b": jnp.ones((2, 3), jnp.bfloat16)}
    saved(tmp_path, state, 1)
    file = tmp_path / "1.snapshot"
    raw, (metadata, arrays) = file.read_bytes(), _read(file)
    bits = np.random.default_rng(0).integers(0, 8, len(raw))
    sound = 0
    for i, bit in enumerate(bits):
        file.write_bytes(raw[:i] + bytes([raw[i] ^ 1 << bit]) + raw[i + 1 :])
        try:
            found, read = _read(file)
        except Exception:
            continue
        sound += 1
        assert found == metadata
        chex.assert_trees_all_equal(read, arrays)
    assert sound < len(raw) / 2  # of the others the flipped byte tells nothing


def test_new_workers_copy_replicas_and_draw_numbers_of_their_own(tmp_path):
    two = a_state(n=2)
    saved(tmp_path, two, 5)
    found = Snapshots(tmp_path).restore(a_state(n=N, seed=1))
    assert found.newcomers == [2, 3]
    olds, news = (jax.tree.map(lambda x, i=i: x[i:][:2], found.state) for i in (0, 2))
    assert_same_bits(olds, two)
    for name, distinct in (("key", 1), ("own", N)):  # equal keys stay equal
        words = np.asarray(jax.random.key_data(found.state[name]))
        assert len({x.tobytes() for x in words}) == distinct
        news[name] = two[name]
    assert_same_bits(news, two)


def test_wrong_uses_are_refused(tmp_path):
    def refused(said, call, *args):
        with pytest.raises((ValueError, OSError), match=said):
            call(*args)

    state, directory = {"w": jnp.ones((N, 3))}, tmp_path / "own"
    snapshots = Snapshots(directory)
    refused(r"restore\(like\) must come before save", snapshots.save, 1, state)
    assert snapshots.restore(state) is None
    bad = {"x": jnp.ones(2)}
    refused("extra must be a dict that JSON can hold", snapshots.save, 1, state, bad)
    refused("step must be an integer of at least 0", snapshots.save, -1, state)
    snapshots.save(1, state)
    alone = "give this one a directory of its own"
    refused(alone, Snapshots(directory).restore, state)
    other = {"w": jnp.ones((N, 4)), "b": jnp.ones(N)}
    said = r"1\.snapshot does not fit: .*b.* is missing.*\[3\], expected .*\[4\]: "
    refused(said, snapshots.restore, other)


A, B, C = 1, 2, 3  # jobs, by when they began


@pytest.mark.parametrize(
    ("told", "step", "holders"),
    [
        ([], None, []),
        ([(A, []), (A, [])], None, []),
        # Killed between two saves.
        ([(A, [(A, 4), (A, 5)]), (A, [(A, 5), (A, 6)])], 5, [1, 1]),
        ([(A, [(A, 4), (A, 5)]), (0, [])], 5, [1, 0]),
        # The second was lost before, and has the same step of another history.
        ([(B, [(B, 5), (B, 6)]), (A, [(A, 4), (A, 5)])], 6, [1, 0]),
        # It was lost one save ago: what the others did since is not given up.
        ([(B, [(A, 5), (B, 6)]), (A, [(A, 4), (A, 5)])], 6, [1, 0]),
        # They died before the next save: it has the step that they have.
        ([(B, [(A, 4), (A, 5)]), (A, [(A, 4), (A, 5)])], 5, [1, 1]),
        # Two of the last job, one of them ahead, and one that was lost before.
        ([(C, [(B, 8), (C, 9)]), (C, [(B, 7), (B, 8)]), (A, [(A, 8)])], 8, [1, 1, 0]),
        # A later file of a history that was left.
        ([(B, [(A, 9), (B, 7)])], 7, [1]),
        # Files of the last job were damaged.
        ([(A, [(A, 5)]), (A, [(A, 6)])], 6, [0, 1]),
    ],
)
def test_the_step_to_go_on_from(told, step, holders):
    rows = [[job, [[of, at, 1, {"at": at}] for of, at in own], 9] for job, own in told]
    extras = [{"at": step} if holds else {} for holds in holders]
    assert _agreed(rows) == ((step, holders, extras) if holders else None)


def launched(directory, slots, steps, **options):
    """What each process said: its step, newcomers, bits at the start and the end."""
    options |= {"slots": ",".join(slots), "steps": steps, "save-every": 1}
    with resumable(directory, len(slots), **options) as run:
        return run.statuses(), run.found(), run.told()


def same_on_all(found, *, when):
    """The leaves of which all workers have the same bits."""
    of_all = [result[when] for result in found]
    words = {name: {x for of in of_all for x in of[name]} for name in of_all[0]}
    return {name for name, values in words.items() if len(values) == 1}


@pytest.mark.long
def test_workers_are_lost_and_come_back(tmp_path):
    statuses, found, told = launched(tmp_path, "012", 9, fail="1:6:unsaved")
    assert statuses[1] == -signal.SIGKILL
    assert {statuses[0], statuses[2]} <= {1, -signal.SIGABRT}, told
    left = [kept(tmp_path / slot) for slot in "02"]
    step = 6 if all("6" in steps for steps in left) else 5  # which all have in any case
    assert {*left[0], *left[1]} <= {"4", "5", "6"}

    statuses, found, told = launched(tmp_path, "02", 9)
    assert statuses == [0, 0], told
    assert [(first, new) for first, new, *_ in found] == [(step, [])] * 2
    equal = same_on_all(found, when=2)
    momenta = {name for name in found[0][2] if ".mu" in name or name == "[2]"}
    assert set(found[0][2]) - equal == momenta  # of p and v all bits are equal
    assert same_on_all(found, when=3) == equal
    ends = [result[3] for result in found]

    # The one that was lost comes back, with snapshots of its own of older steps.
    statuses, found, told = launched(tmp_path, "210", 11)
    assert statuses == [0, 0, 0], told
    assert [(first, new) for first, new, *_ in found] == [(9, [1])] * 3
    assert [found[2][2], found[0][2]] == ends
    new = {k: x for k, x in found[1][2].items() if k != "[2]"}
    assert new == {k: x for k, x in ends[1].items() if k != "[2]"}  # of slot 2
    assert len({result[2]["[2]"][0] for result in found}) == 3  # keys
    assert same_on_all(found, when=3) == equal


@pytest.mark.long
def test_a_directory_of_two_processes_is_refused_by_all(tmp_path):
    _, _, told = launched(tmp_path, ["one", "one"], 9)
    assert all("give this one a directory of its own" in error for error in told)
