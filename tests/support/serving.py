"""Starts a service in a child process for one test."""

import contextlib
import os
import select
import signal
import socket
from pathlib import Path

import pytest
from watching import until

from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import GetStatus, Status

# Prints a line when it serves and when it has ended.
SERVE = """
import sys
from shmload._cli import serve
from shmload._cli.main import main
serve._notify_systemd = lambda message: print(message, flush=True)
main(["serve", *sys.argv[1:]], standalone_mode=False)
print("ENDED", flush=True)
"""
_DEADLINE_S = 30.0


@pytest.fixture
def service(new_child, configure, tmp_path, evicts):
    """Start a service and wait until it serves: `service("--budget", "1MB")`; loads then use it."""
    configure(service="auto", socket=tmp_path / "run" / "service.sock", inline_nbytes=0, workers=1)

    def start(*arguments):
        process = new_child(SERVE, *arguments)
        process.expect("READY=1")
        return process

    return start


def ask(request, kind):
    with Client(socket_path()) as client:
        return client.ask(request, kind, on_wait=lambda: None)


def status():
    with Client(socket_path()) as client:
        return client.ask(GetStatus(), Status)


def wait_until(is_so):
    """Poll the service's status until a condition holds."""
    until(lambda: is_so(status()))


def workers_of(process):
    """Return the pids of a service's children."""
    found = set()
    for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that just ended
            found.update(map(int, children.read_text().split()))
    return sorted(found)


@contextlib.contextmanager
def stopped(*pids):
    """Stop processes inside the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def raw_client():
    """Connect a plain socket to the service, without the client's protocol."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        # Connect before setting a deadline: with one, a full backlog is an error at once.
        client.connect(str(socket_path()))
        client.settimeout(_DEADLINE_S)
        yield client


def read_to_the_end(client):
    with contextlib.suppress(ConnectionResetError):
        while client.recv(1 << 16):
            pass


def drip(client, head):
    """Send a request, of which this is the begin, byte by byte until the other end closes."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(head)
        while not (select.select([client], [], [], 0.01)[0] and client.recv(1 << 16) == b""):
            client.sendall(b"x")


def held_by(process):
    """Return how many descriptors and threads a service has."""
    return [len(os.listdir(f"/proc/{process.pid}/{kind}")) for kind in ("fd", "task")]


def wait_until_alone(process, before):
    """Wait until a service has no client and as many descriptors and threads as before."""
    until(lambda: status().clients <= 1 and held_by(process) == before)
