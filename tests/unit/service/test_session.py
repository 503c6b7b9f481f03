"""The service tells a client the progress of its load."""

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
    BytesRead,
    Decode,
    Refused,
    Reserve,
    Welcome,
    decode_answer,
)
from shmload._service.session import ProgressStream, Session
from shmload.errors import ShardTruncated, SharedMemoryFull, WorkerFailed


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        yield ours, theirs


def test_client_that_takes_no_progress_is_not_waited_for(ends, configure):
    configure(service_timeout_s=0)
    stream = ProgressStream(ends[0])
    began = time.monotonic()
    while not stream.is_stuck:
        stream.report(BytesRead(1, 2))
    stream.report(BytesRead(1, 2))
    assert time.monotonic() - began < 30


def test_next_request_begins_at_nothing(ends, monkeypatch):
    monkeypatch.setattr(session, "_HEARTBEAT_S", -1.0)
    ours, theirs = ends
    stream, inbox = ProgressStream(ours), Inbox(theirs)
    stream.report(BytesRead(7, 9))
    stream.finish()
    stream.beat()
    inbox.receive()
    heard = [decode_answer(inbox.next_frame()) for _ in range(2)]
    assert heard == [BytesRead(7, 9), BytesRead(0, 0)]


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


def test_failed_decode_is_a_line_with_model_file_and_error(state, ends, monkeypatch, caplog):
    error = ShardTruncated("/models/team-a/sd/unet/m.safetensors", 10, 5)
    monkeypatch.setattr(state, "decode", failing(error))
    assert isinstance(answer_to(Decode(_MODEL, 60.0), state, ends), Refused)
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert line.getMessage() == f"sd failed: {error}"
    assert (line.model, line.source) == ("sd", _MODEL.path)
    assert (line.error, line.path) == ("ShardTruncated", "/models/team-a/sd/unet/m.safetensors")
    assert line.pid == os.getpid()


def test_failed_worker_is_a_line_with_its_last_words(state, ends, monkeypatch, caplog):
    error = WorkerFailed("a worker failed")
    error.add_note("its output: my last words")
    monkeypatch.setattr(state, "decode", failing(error))
    answer_to(Decode(_MODEL, 60.0), state, ends)
    assert caplog.messages == ["sd failed: a worker failed its output: my last words"]


def test_refused_load_is_a_line_with_the_amounts(state, ends, monkeypatch, caplog):
    error = SharedMemoryFull(381 << 20, 60 << 20, "the service's budget", "raise it")
    monkeypatch.setattr(state, "reserve", failing(error))
    assert isinstance(answer_to(Reserve(381 << 20, 0, _MODEL), state, ends), Refused)
    (line,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert line.getMessage() == f"sd was refused: {error}"
    assert (line.needed, line.available) == (381 << 20, 60 << 20)
    assert (line.model, line.error) == ("sd", "SharedMemoryFull")


def test_decode_whose_client_left_is_a_line(state, ends, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "shmload")
    monkeypatch.setattr(state, "decode", failing(DecodeCancelled()))
    answer_to(Decode(_MODEL, 60.0), state, ends)
    assert caplog.messages == [f"sd was given up: process {os.getpid()} left"]
