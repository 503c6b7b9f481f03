"""The garbage collector around loads."""

import gc

import pytest

from shmload._host import collector


def test_frozen_objects_are_not_counted(monkeypatch):
    monkeypatch.setattr(collector, "_has_frozen", False)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("visits every frozen object"))
    collector.freeze()
    try:
        with collector.paused_gc():
            assert not gc.isenabled()
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_all_pauses_of_a_thread_are_given_back_while_it_waits():
    with collector.paused_gc(), collector.paused_gc():
        with collector.resumed_gc():
            assert gc.isenabled()
            with collector.paused_gc():
                assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with collector.resumed_gc():
        assert gc.isenabled()
    assert gc.isenabled()
