"""A service's answer is the one requested or a typed error; a load takes nothing else."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmload._ipc.frames import to_frame
from shmload._segments.roots import Root
from shmload._service import client as client_module
from shmload._service.client import Client
from shmload._service.protocol import (
    VERSION,
    GetStatus,
    Noted,
    Reserved,
    Waiting,
    Welcome,
)
from shmload.errors import ProtocolError


def ask(monkeypatch, *answers):
    """Reserve room at a service that sent its answers beforehand and closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(client_module, "connect", lambda path, timeout_s: ours)
        theirs.sendall(b"".join(a if isinstance(a, bytes) else to_frame(a) for a in answers))
        theirs.shutdown(socket.SHUT_WR)
        with Client(Path("socket")) as client:
            return client.reserve(Root(path="m"), 1, lambda: None, bool)


_WELCOME = Welcome(VERSION, 1)


@pytest.mark.parametrize(
    "answers",
    [
        [b"\xff" * 100],
        [Welcome(VERSION + 1, 1)],
        [GetStatus()],
        [_WELCOME, _WELCOME],
        [_WELCOME, b"\x00\x00\x00\x05hello"],
        [_WELCOME, Waiting(), Noted()],
    ],
    ids=["rubbish", "version", "request", "welcome", "half", "other"],
)
def test_service_that_answers_wrongly_is_a_protocol_error(monkeypatch, answers):
    with pytest.raises(ProtocolError):
        ask(monkeypatch, *answers)


def test_service_that_shows_signs_of_life_may_take_longer_than_the_deadline(monkeypatch, configure):
    configure(service_timeout_s=10)
    heard = []
    clock = SimpleNamespace(monotonic=lambda: 9.0 * len(heard))  # each sign comes after 9 s
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(client_module, "connect", lambda path, timeout_s: ours)
        monkeypatch.setattr(client_module, "time", clock)
        theirs.sendall(b"".join(map(to_frame, (_WELCOME, Waiting(), Waiting()))))

        def answer_after_a_silence():
            if len(heard) == 2:
                theirs.sendall(to_frame(Reserved(("a",))))
            return False

        with Client(Path("socket")) as client:
            wait = lambda: heard.append(1)  # noqa: E731
            assert client.reserve(Root(path="m"), 1, wait, answer_after_a_silence) == ("a",)
    assert heard == [1, 1]
