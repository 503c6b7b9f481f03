"""The coordinator's end of a worker knows since when the worker is silent."""

import socket
import time
import types

import pytest

from shmload._decoding.worker_process import WorkerProcess
from shmload._ipc import procs
from shmload.workers.messages import Fill


@pytest.fixture
def worker(monkeypatch):
    """A worker whose process is a socket that takes all messages."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = types.SimpleNamespace(channel=ours)
        monkeypatch.setattr(procs, "start", lambda *arguments, **keywords: child)
        yield WorkerProcess()


def give(worker, piece):
    fd = worker.channel.fileno()
    worker.give(Fill(0, piece, ()), fd, fd, 1)


def test_time_without_work_is_not_silence(worker):
    worker.active_at -= 3600
    before = time.monotonic()
    give(worker, 0)
    assert worker.active_at >= before


def test_next_piece_is_no_sign_of_life(worker):
    give(worker, 0)
    before = worker.active_at
    give(worker, 1)
    assert worker.active_at == before
