"""Telling a client how far its load is."""

import socket
import time

import pytest

from shmload._session import ProgressStream


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
        stream.report(1, 2)
    stream.report(1, 2)
    assert time.monotonic() - began < 30
