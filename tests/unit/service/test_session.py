"""The service tells a client the progress of its load."""

import socket
import time

import pytest

from shmload._ipc.frames import Inbox
from shmload._service import session
from shmload._service.protocol import BytesRead, decode_answer
from shmload._service.session import ProgressStream


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
