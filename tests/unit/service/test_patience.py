"""A client keeps trying to connect to a service whose backlog is full."""

import contextlib
import socket
import time

import pytest

from shmload._service.endpoint import connect
from shmload.errors import ServiceUnavailable


@pytest.fixture
def crowded(tmp_path):
    """A listener whose backlog is full, and its path."""
    path = tmp_path / "service.sock"
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                client = closing.enter_context(socket.socket(socket.AF_UNIX))
                client.setblocking(False)
                client.connect(str(path))
        yield listener, path


def test_client_waits_for_a_place(crowded, monkeypatch):
    listener, path = crowded

    def let_one_in(seconds):
        listener.accept()[0].close()

    monkeypatch.setattr(time, "sleep", let_one_in)
    connect(path, 60).close()


def test_client_does_not_wait_for_ever(crowded):
    with pytest.raises(ServiceUnavailable, match="temporarily unavailable"):
        connect(crowded[1], 0)
