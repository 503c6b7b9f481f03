"""The service shows a client that waits signs of life, and logs what it refuses."""

import logging
import os
import socket
import threading
import time

import pytest

from shmload._decoding.job import DecodeCancelled
from shmload._ipc.frames import Inbox, send
from shmload._segments.roots import Root
from shmload._service import session
from shmload._service.protocol import (
    Refused,
    Reserve,
    Waiting,
    Welcome,
    decode_answer,
)
from shmload._service.session import LifeSigns, Session, has_hung_up
from shmload.errors import SharedMemoryFull


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        yield ours, theirs


def test_client_that_takes_no_sign_is_not_waited_for(ends, configure, monkeypatch):
    configure(service_timeout_s=0)
    monkeypatch.setattr(session, "_HEARTBEAT_S", -1.0)
    signs = LifeSigns(ends[0])
    began = time.monotonic()
    while not signs.is_stuck:
        signs.beat()
    signs.beat()
    assert time.monotonic() - began < 30


def test_next_request_begins_at_nothing(ends, monkeypatch):
    monkeypatch.setattr(session, "_HEARTBEAT_S", -1.0)
    ours, theirs = ends
    signs, inbox = LifeSigns(ours), Inbox(theirs)
    signs.beat()
    signs.finish()
    signs.beat()
    inbox.receive()
    assert [decode_answer(inbox.next_frame()) for _ in range(2)] == [Waiting()] * 2


def test_telling_a_client_that_has_left_is_no_failure(ends):
    # Otherwise the end of its load might be logged as an error of the service.
    ours, theirs = ends
    signs = LifeSigns(ours)
    theirs.close()
    signs.beat()
    assert has_hung_up(ours)


# The log ------------------------------------------------------------------------------------------

_MODEL = Root(path="/models/team-a/sd")


def answer_to(request, state, ends):
    """Send one request to a session; return its answer after the welcome."""
    ours, theirs = ends
    serving = threading.Thread(target=Session(ours, state).run)
    serving.start()
    inbox = Inbox(theirs)
    send(theirs, request)
    found = []
    while len(found) < 2:
        inbox.receive()
        while (frame := inbox.next_frame()) is not None:
            found.append(decode_answer(frame))
    theirs.close()
    serving.join()
    assert isinstance(found[0], Welcome)
    return found[1]


def failing(exc):
    def fail(*args):
        raise exc

    return fail


def test_refused_load_is_a_line_with_the_amounts(state, ends, monkeypatch, caplog):
    error = SharedMemoryFull(381 << 20, 60 << 20, "the service's budget", "raise it")
    monkeypatch.setattr(state, "reserve", failing(error))
    assert isinstance(answer_to(Reserve(381 << 20, 0, _MODEL), state, ends), Refused)
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert line.getMessage() == f"sd was refused: {error}"
    assert (line.needed, line.available) == (381 << 20, 60 << 20)
    assert (line.model, line.error) == ("sd", "SharedMemoryFull")


def test_load_whose_client_left_is_a_line(state, ends, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "shmload")
    monkeypatch.setattr(state, "reserve", failing(DecodeCancelled()))
    answer_to(Reserve(1, 0, _MODEL), state, ends)
    assert caplog.messages == [f"sd was given up: process {os.getpid()} left"]
