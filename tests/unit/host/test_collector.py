"""The garbage collector around loads."""

import gc
import sys
import weakref

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


@pytest.mark.usefixtures("unfrozen")
def test_what_a_program_dropped_before_the_imports_goes(monkeypatch):
    class Circle:
        def __init__(self):
            self.itself = self

    monkeypatch.delitem(sys.modules, "diffusers", raising=False)
    with collector.paused_gc():
        dropped = weakref.ref(Circle())
        with collector.freezing_imports():
            pass
    gc.collect()
    assert dropped() is None
