"""Work in a thread: its result or error reaches the caller, and Ctrl-C does not end the wait."""

import signal
import threading
import time

import pytest

from shmload._host.background import Background


def started(function):
    background = Background(function, "test-background")
    background.start()
    return background


def test_every_wait_raises_the_error_and_a_join_does_not():
    def fail():
        raise LookupError("not there")

    background = started(fail)
    background.join()
    for _ in range(2):
        with pytest.raises(LookupError, match="not there"):
            background.wait()


def test_join_lasts_until_the_end_though_it_is_interrupted(monkeypatch):
    join = Background.join
    joining, noticed = threading.Event(), threading.Event()

    def join_and_say_so(background):
        joining.set()
        join(background)

    def interrupt(*_):
        if not noticed.is_set():
            noticed.set()
            raise KeyboardInterrupt

    def work():
        assert joining.wait(10)
        deadline = time.monotonic() + 10
        while not noticed.wait(0.05):  # a signal just before the wait goes unnoticed
            assert time.monotonic() < deadline
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        ended.append(True)

    ended = []
    monkeypatch.setattr(Background, "join", join_and_say_so)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        background = started(work)
        assert isinstance(background.join_undisturbed(), KeyboardInterrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    background.wait()
    assert ended == [True]
    assert background.join_undisturbed() is None


def test_what_could_not_be_started_is_over(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    background = Background(list, "test-background")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        background.start()
    assert background.join_undisturbed() is None


def test_what_was_interrupted_before_it_began_is_over_and_never_begins(monkeypatch):
    starts, done = [], []
    start = threading.Thread.start

    def interrupt(thread):
        starts.append(thread)
        raise KeyboardInterrupt

    background = Background(lambda: done.append(True), "test-background")
    assert background.join_undisturbed() is None
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            background.start()
    assert background.join_undisturbed() is None
    start(starts[0])  # the first start was already under way in the kernel
    starts[0].join()
    assert done == []
