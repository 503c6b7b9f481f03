"""Steps add up their time, and a long one says what it does."""

import threading
from types import SimpleNamespace

import pytest

from shmload._loading import progress as module
from shmload._loading.progress import Progress, Step, Steps

DEADLINE_S = 20


class Listener:
    """Hears what steps say; agrees from the second time on if it was `busy` at first."""

    def __init__(self, busy=0):
        self.heard = []
        self.busy = busy
        self.has_heard = threading.Event()

    def __call__(self, text):
        self.heard.append(text)
        if len(self.heard) <= self.busy:
            return False
        self.has_heard.set()
        return True


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "_SILENCE_S", 0.001)


@pytest.mark.parametrize("busy", [0, 2])
def test_long_step_says_what_it_does_once_nothing_else_speaks(busy):
    listener = Listener(busy)
    with Steps(listener).during(Step.IMPORTING, "importing"):
        assert listener.has_heard.wait(DEADLINE_S)
    assert listener.heard == ["importing"] * (busy + 1)


def test_short_step_says_nothing(monkeypatch):
    monkeypatch.setattr(module, "_SILENCE_S", DEADLINE_S)
    listener = Listener()
    with Steps(listener).during(Step.IMPORTING, "importing"):
        pass
    assert listener.heard == []


def test_time_is_counted_also_of_a_step_that_fails(monkeypatch):
    times = iter([1.0, 3.5, 10.0, 10.04, 20.0, 21.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    steps = Steps(Listener())
    with pytest.raises(ZeroDivisionError), steps.during(Step.READING):
        1 / 0  # noqa: B018
    with steps.during(Step.DERIVING_RULES):
        pass
    with steps.during(Step.READING):
        pass
    assert steps.elapsed_s(Step.READING) == 3.5
    assert steps.describe() == "reading 3.5 s"


@pytest.mark.parametrize(("done", "is_said"), [(0, True), (1, False), (2, True)])
def test_step_is_silent_only_while_the_bar_moves(capsys, done, is_said):
    with Progress(True, "flux") as progress:
        progress.start(2)
        progress.add(done)
        assert progress._say("importing") is is_said
    assert ("flux: importing" in capsys.readouterr().err) is is_said
