"""A service without room or descriptors for another client continues when it has them again."""

import contextlib
import os
import re
import resource
import socket
import time
from pathlib import Path

import pytest
from serving import held_by, raw_client, status, wait_until_alone
from watching import until

from shmload._ipc.frames import to_frame
from shmload._service.protocol import GetStatus
from shmload._service.server import _MAX_CLIENTS


@contextlib.contextmanager
def few_descriptors(process, count):
    """Limit a service inside the block to `count` more descriptors than it has now."""
    highest = max(map(int, os.listdir(f"/proc/{process.pid}/fd")))
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (highest + 1 + count, before[1]))
    yield
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


def test_service_without_descriptors_serves_again_when_it_has_some(service):
    process = service()
    pid = status().pid
    before = held_by(process)
    with few_descriptors(process, 4), contextlib.ExitStack() as closing:
        for _ in range(10):
            closing.enter_context(raw_client())
        until(lambda: "Too many open files" in process.errors)
    wait_until_alone(process, before)
    assert status().pid == pid


def test_service_with_too_many_clients_waits_until_one_leaves(service):
    process = service()
    with contextlib.ExitStack() as closing:
        clients = [closing.enter_context(raw_client()) for _ in range(_MAX_CLIENTS + 1)]
        for client in clients[:-1]:
            assert client.recv(100)
        began, used = time.monotonic_ns(), main_thread_ns(process)
        for _ in range(100):
            clients[0].sendall(to_frame(GetStatus()))
            assert clients[0].recv(1 << 16)
        # A busy loop would take half of the time and slow the others.
        assert main_thread_ns(process) - used < (time.monotonic_ns() - began) / 4
        clients[1].close()
        assert clients[-1].recv(100)


@pytest.mark.slow
def test_strangers_who_ask_for_metrics_take_few_descriptors(service):
    process = service("--metrics", "127.0.0.1:0")
    (port,) = re.findall(r"metrics at http://127.0.0.1:([0-9]+)/", process.errors)
    before, _ = held_by(process)
    with contextlib.ExitStack() as closing:
        for _ in range(300):
            client = closing.enter_context(socket.create_connection(("127.0.0.1", int(port))))
            client.sendall(b"GET /")
        assert status().pid == process.pid
        assert held_by(process)[0] <= before + 40


def main_thread_ns(process):
    """Return the processor time of a service's main thread."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/schedstat")
    return int(path.read_text().split()[0])
