"""The service accepts clients, lets them wait when it is full, and survives every failure."""

import contextlib
import errno
import os
import socket
import threading

import pytest
import torch
from safetensors.torch import save_file
from watching import until

from shmload._service import server as server_module
from shmload._service.client import Client
from shmload._service.endpoint import Endpoint
from shmload._service.protocol import GetStatus, Reserve, Reserved, Status
from shmload._service.server import Sessions, serve
from shmload._service.state import ServiceState


@pytest.fixture
def state():
    with contextlib.closing(ServiceState(1 << 20)) as state:
        yield state


@pytest.fixture
def endpoint(tmp_path):
    with contextlib.closing(Endpoint(tmp_path / "run" / "service.sock")) as endpoint:
        yield endpoint


@pytest.fixture
def served(endpoint, state):
    """The path of a service that runs in a thread of this process."""
    server = threading.Thread(target=serve, args=(endpoint, state, lambda: None))
    server.start()
    yield endpoint.path
    state.stop()
    server.join()


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(8)}, path)
    return path


def knock(endpoint):
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(endpoint.path))
    client.setblocking(False)
    return client


def is_let_in(client):
    """Tell whether the service has accepted a client with its first message."""
    with contextlib.suppress(BlockingIOError):
        return bool(client.recv(1, socket.MSG_PEEK))
    return False


def accept_until(sessions, endpoint, client):
    while not is_let_in(client):
        sessions.accept(endpoint.listener)


def test_client_beyond_the_most_is_served_when_another_leaves(endpoint, state):
    with (
        Sessions(state, at_most=1) as sessions,
        knock(endpoint) as first,
        knock(endpoint) as second,
    ):
        accept_until(sessions, endpoint, first)
        sessions.accept(endpoint.listener)
        assert not is_let_in(second)
        assert state.status().clients == 1
        first.close()
        accept_until(sessions, endpoint, second)


class NoDescriptorOnce:
    """A listener whose first accept fails for want of a descriptor."""

    def __init__(self, listener):
        self._listener = listener
        self._is_first = True

    def accept(self):
        if self._is_first:
            self._is_first = False
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()


def test_lack_of_descriptors_puts_a_client_off(endpoint, state, caplog):
    with Sessions(state, at_most=1) as sessions, knock(endpoint) as client:
        sessions.accept(NoDescriptorOnce(endpoint.listener))
        assert "Too many open files" in caplog.text
        assert not is_let_in(client)
        accept_until(sessions, endpoint, client)


def test_lack_of_threads_turns_one_client_away(endpoint, state, caplog, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with Sessions(state, at_most=1) as sessions:
        with knock(endpoint) as client:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", fail)
                sessions.accept(endpoint.listener)
            assert "can't start new thread" in caplog.text
            assert client.recv(1) == b""
        with knock(endpoint) as client:
            accept_until(sessions, endpoint, client)


def test_client_that_has_left_before_it_is_let_in(endpoint, state):
    with Sessions(state, at_most=1) as sessions:
        knock(endpoint).close()
        sessions.accept(endpoint.listener)
        with knock(endpoint) as client:
            accept_until(sessions, endpoint, client)


def test_more_clients_than_are_served_at_a_time_all_get_an_answer(endpoint, state, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_CLIENTS", 2)
    answers = []

    def ask():
        with Client(endpoint.path) as client:
            answers.append(client.ask(GetStatus(), Status))

    clients = [threading.Thread(target=ask) for _ in range(8)]
    server = threading.Thread(target=serve, args=(endpoint, state, lambda: None))
    server.start()
    try:
        for client in clients:
            client.start()
        for client in clients:
            client.join()
    finally:
        state.stop()
        server.join()
    assert len(answers) == 8
    assert max(answer.clients for answer in answers) <= 2


# Long requests ------------------------------------------------------------------------------------


class Beats:
    """Counts a service's heartbeats; sets `are_enough` after a few."""

    def __init__(self):
        self._count = 0
        self.are_enough = threading.Event()

    def __call__(self):
        self._count += 1
        if self._count == 3:
            self.are_enough.set()


def test_client_that_waits_for_room_is_shown_life(served, state, monkeypatch):
    beats = Beats()

    def wait(claim, nbytes, timeout_s, on_wait):
        while not beats.are_enough.is_set():
            on_wait()
        return []

    monkeypatch.setattr(state, "reserve", wait)
    with Client(served) as client:
        client.ask(Reserve(1, 60), Reserved, on_wait=beats)


def test_client_that_leaves_ends_its_wait(served, state, monkeypatch):
    class Left(Exception):
        pass

    def leave():
        raise Left

    def wait(claim, nbytes, timeout_s, on_wait):
        while True:
            on_wait()

    monkeypatch.setattr(state, "reserve", wait)
    with pytest.raises(Left), Client(served) as client:
        client.ask(Reserve(1, 60), Reserved, on_wait=leave)
    until(lambda: not state.status().clients)
