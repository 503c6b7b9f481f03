"""The garbage collector is off during loads, and afterwards as it was before."""

import contextlib
import gc
import importlib
import sys
import weakref

import pytest

from shmload._host.collector import freeze_imports, paused_gc


@pytest.fixture
def given_back():
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.usefixtures("given_back")
@pytest.mark.parametrize("was_enabled", [True, False])
def test_collector_is_off_until_the_last_of_several_pauses_ends(was_enabled):
    # Overlapping, as in two threads: neither ends inside the other.
    (gc.enable if was_enabled else gc.disable)()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    for _ in range(2):
        first.enter_context(paused_gc())
        second.enter_context(paused_gc())
        first.close()
        assert not gc.isenabled()
        second.close()
        assert gc.isenabled() is was_enabled


@pytest.mark.usefixtures("given_back")
def test_collector_is_on_again_after_an_error():
    gc.enable()
    with pytest.raises(ZeroDivisionError), paused_gc():
        raise ZeroDivisionError
    assert gc.isenabled()


@pytest.mark.usefixtures("unfrozen")
def test_nothing_is_frozen_after_a_pause():
    with paused_gc():
        pass
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("unfrozen")
def test_what_a_program_has_frozen_stays():
    gc.freeze()
    with paused_gc():
        pass
    assert gc.get_freeze_count() > 0


class Thing:
    pass


# What torch leaves when it is imported: a frame in its own locals.
_MODULE = """
import sys

def leave_a_circle():
    own = sys._getframe()
    assert own

leave_a_circle()
"""


def _waits():
    thing = Thing()
    yield weakref.ref(thing)
    yield thing


def _fails(errors):
    kept = "kept"
    try:
        raise KeyError(kept)
    except KeyError as error:
        errors.append(error)


def _load(name, errors):
    importlib.import_module(name)
    _fails(errors)
    waiting = _waits()
    reference = next(waiting)
    freeze_imports()
    assert reference() is next(waiting)  # it was not ended
    made = Thing()
    return weakref.ref(made)


@pytest.mark.usefixtures("given_back", "unfrozen")
def test_what_a_call_makes_after_its_imports_were_frozen_goes(tmp_path, monkeypatch):
    (tmp_path / "leaves_a_circle.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    gc.disable()
    errors = []
    made = _load("leaves_a_circle", errors)
    assert errors[0].__traceback__.tb_frame.f_locals["kept"] == "kept"  # no import had it
    errors.clear()
    assert made() is None
    del sys.modules["leaves_a_circle"]
