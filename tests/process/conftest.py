"""The two orders in which the bytes of a pipeline and its modules can come."""

import threading

import pytest

from shmload._load import Load
from shmload.workers.fill import Filler


@pytest.fixture
def bytes_come_last(monkeypatch):
    """Let this process decode, and only when the pipeline was built from what is there before."""
    is_wanted = threading.Event()
    begin, wait, close, fill = Load._begin, Load.wait, Load.close, Filler.fill

    def begin_anew(load):
        is_wanted.clear()
        begin(load)

    def fill_late(*args):
        assert is_wanted.wait(60)
        return fill(*args)

    def then(method):
        def call(load):
            is_wanted.set()
            method(load)

        return call

    monkeypatch.setattr(Load, "_begin", begin_anew)
    monkeypatch.setattr(Load, "wait", then(wait))
    monkeypatch.setattr(Load, "close", then(close))
    monkeypatch.setattr(Filler, "fill", fill_late)


@pytest.fixture
def bytes_come_first(monkeypatch):
    """Let all be decoded before the pipeline is built."""
    begin = Load._begin

    def begin_and_end(load):
        begin(load)
        if load._thread:
            load._thread.join()

    monkeypatch.setattr(Load, "_begin", begin_and_end)


@pytest.fixture(params=["bytes_come_first", "bytes_come_last"])
def either_order(request):
    return request.getfixturevalue(request.param)
