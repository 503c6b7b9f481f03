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
