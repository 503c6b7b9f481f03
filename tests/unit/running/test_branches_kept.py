"""Which branches a template starts and ends."""

import contextlib
import select
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from shmload._templates import branches, notes
from shmload._templates.branches import Branches
from shmload._templates.messages import Noted, State

_REQUEST = '{"source":"a","keep":true}'


@pytest.fixture
def clock(monkeypatch):
    """A list with the time in seconds, which the test moves on."""
    now = [time.monotonic()]
    monkeypatch.setattr(branches, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def children(monkeypatch):
    """The processes that stand for branches: they wait until they are killed."""
    started = []

    def fork():
        wait = "import sys; sys.stdin.read()"
        started.append(subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE))
        return started[-1].pid

    with monkeypatch.context() as patch:
        patch.setattr(branches.os, "fork", fork)
        yield started
    for child in started:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        child.stdin.close()
        child.wait()


@pytest.fixture
def kept(clock, children, tmp_path, monkeypatch):
    """The branches of a template, of which one has just begun to load a pipeline."""
    monkeypatch.setattr(notes, "warmed", list)
    kept = Branches(tmp_path.name, select.poll(), None, can_load=True)
    kept.note(Noted("program", [_REQUEST], ["module"], 0, 0))
    kept.tend()
    assert [each["state"] for each in kept.about()] == ["loading"]
    yield kept
    kept.end()


def _note(kept, child):
    kept.note(Noted("program", [_REQUEST], [], child.pid, 0))
    kept.tend()


def _say_imported(kept):
    [branch] = kept._running.values()
    branch.state = State(1, 0, 1, 0, 0, "")


def test_load_without_end_is_ended_and_makes_room_for_others(kept, clock, children):
    other = _REQUEST.replace("a", "b")
    kept.note(Noted("another", [other], ["module"], 0, 0))
    clock[0] += 200
    kept.tend()
    assert len(children) == 1
    clock[0] += 200
    kept.tend()
    assert children[0].wait(60) == -9
    states = {each["sources"][0]: (each["state"], each["reason"]) for each in kept.about()}
    assert states["a"] == ("none", "its load took more than 300 s")
    assert states["b"][0] == "loading"


def test_branch_without_its_pipeline_is_replaced_once_in_ten_minutes(kept, clock, children):
    _say_imported(kept)
    _note(kept, children[0])
    assert len(children) == 2
    for _ in range(3):
        _say_imported(kept)
        clock[0] += 100
        _note(kept, children[1])
        assert len(children) == 2
    clock[0] += 400
    _note(kept, children[1])
    assert len(children) == 3
