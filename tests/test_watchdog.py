"""Watchdogs: what they need of jax, and what they do alone. (Kills: test_resume.)"""

import threading
import types

import jax
import pytest

import slamb_jax
from slamb_jax.workers import watchdog


def test_alone_it_starts_nothing():
    before = threading.active_count()
    with slamb_jax.Watchdog(timeout=30) as dog:
        dog.beat(0)
        assert threading.active_count() == before


@pytest.mark.parametrize("client", [None, types.SimpleNamespace(key_value_set=print)])
def test_it_says_what_broke_when_jax_has_changed(client, monkeypatch):
    """With several processes the private client is looked for, and checked."""
    from jax._src import distributed

    state = types.SimpleNamespace(client=client)
    monkeypatch.setattr(distributed, "global_state", state)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(
        RuntimeError, match=r"no coordination client in jax .*key_value"
    ):
        slamb_jax.Watchdog(timeout=30)


def test_a_missing_module_is_named(monkeypatch):
    import jax._src

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setitem(__import__("sys").modules, "jax._src.distributed", None)
    monkeypatch.delattr(jax._src, "distributed", raising=False)
    with pytest.raises(RuntimeError, match=r"jax\._src\.distributed"):
        watchdog._coordination_client()
