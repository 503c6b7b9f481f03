"""A service's answer is the one requested or a typed error; a load takes nothing else."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from shmload._decoding.job import Job
from shmload._ipc.frames import to_frame
from shmload._segments.roots import Root
from shmload._service import client as client_module
from shmload._service.client import Client
from shmload._service.protocol import (
    VERSION,
    BytesRead,
    Decoded,
    GetStatus,
    Reserved,
    Stat,
    Welcome,
)
from shmload.errors import ProtocolError


def ask(monkeypatch, *answers, jobs=()):
    """Request one decode from a service that sent its answers beforehand and closed."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(client_module, "connect", lambda path, timeout_s: ours)
        theirs.sendall(b"".join(a if isinstance(a, bytes) else to_frame(a) for a in answers))
        theirs.shutdown(socket.SHUT_WR)
        with Client(Path("socket")) as client:
            return client.decode(Root(path="m"), jobs, lambda nbytes: None, bool)


_WELCOME = Welcome(VERSION, 1)


@pytest.mark.parametrize(
    "answers",
    [
        [b"\xff" * 100],
        [Welcome(VERSION + 1, 1)],
        [GetStatus()],
        [_WELCOME, _WELCOME],
        [_WELCOME, b"\x00\x00\x00\x05hello"],
        [_WELCOME, BytesRead(1, 1), Reserved(())],
        [_WELCOME, Decoded(("0" * 32,))],
    ],
    ids=["rubbish", "version", "request", "welcome", "half", "other", "digest too many"],
)
def test_service_that_answers_wrongly_is_a_protocol_error(monkeypatch, answers):
    with pytest.raises(ProtocolError):
        ask(monkeypatch, *answers)


@pytest.mark.parametrize("digest", ["", "0" * 31, "0" * 33, "Z" * 32, "é" * 16])
def test_digest_that_is_none_is_not_written_to_a_segment(monkeypatch, digest):
    job = Job(path="", source_fd=0, source=Stat(1, 1, 1, 1), part_fd=1, nbytes=1, pieces=())
    with pytest.raises(ProtocolError, match="digest"):
        ask(monkeypatch, _WELCOME, Decoded((digest,)), jobs=[job])


def test_service_that_shows_signs_of_life_may_take_longer_than_the_deadline(monkeypatch, configure):
    configure(stall_timeout_s=10)
    heard = []
    clock = SimpleNamespace(monotonic=lambda: 9.0 * len(heard))  # each sign comes after 9 s
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setattr(client_module, "connect", lambda path, timeout_s: ours)
        monkeypatch.setattr(client_module, "time", clock)
        theirs.sendall(b"".join(map(to_frame, (_WELCOME, BytesRead(1, 3), BytesRead(2, 3)))))

        def answer_after_a_silence():
            if len(heard) == 2:
                theirs.sendall(to_frame(Decoded(())))
            return False

        with Client(Path("socket")) as client:
            root = Root(path="m")
            assert client.decode(root, [], heard.append, answer_after_a_silence) == []
    assert heard == [1, 1]
