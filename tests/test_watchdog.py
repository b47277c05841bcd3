"""Watchdogs: what they need of jax, and what they do alone. (Kills: test_resume.)"""

import json
import sys
import threading
import types

import jax
import pytest
from jax._src import distributed

import slamb_jax
from slamb_jax.workers.watchdog import _from_exchange


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
        (SystemExit(3), "failed: SystemExit(3)"),
        (KeyboardInterrupt(), "failed: KeyboardInterrupt()"),
    ],
)
def test_to_exit_with_0_is_no_failure(error, state):
    written = []
    watchdog = slamb_jax.Watchdog(timeout=15)
    watchdog._client = types.SimpleNamespace(
        key_value_set=lambda key, value, **_: written.append(json.loads(value))
    )
    watchdog.__exit__(type(error), error, None)
    assert [sign["state"] for sign in written] == [state]
