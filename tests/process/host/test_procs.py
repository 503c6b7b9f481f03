"""Processes that shmload starts begin with the right state, and their ends are reported."""

import functools
import signal
import socket
import subprocess

import pytest

from shmload._host.procs import _environment, how_it_ended, start


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Write a module; return `start` for it."""

    def write(code):
        (tmp_path / "program.py").write_text(f"import os, signal, socket, sys\n{code}\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return functools.partial(start, "program")

    return write


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit code 0"), (-signal.SIGSEGV, "SIGSEGV"), (-40, "signal 40")]
)
def test_every_end_has_a_name(code, said):
    assert how_it_ended(code) == said


def test_child_that_is_asked_to_end_does(program):
    code = "print(flush=True)\nwhile True: signal.pause()"
    child = program(code)(stdout=subprocess.PIPE)
    with child.process.stdout as stdout:
        stdout.readline()
        assert child.end(60) == "SIGTERM"


def test_child_that_will_not_end_is_killed(program):
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
while True: signal.pause()
"""
    child = program(code)(stdout=subprocess.PIPE)
    with child.process.stdout as stdout:
        stdout.readline()
        assert child.end(0.1) == "SIGKILL"
    assert not child.has_exited
    assert child.pidfd == -1


def test_child_gets_no_interrupt_of_its_group(program):
    code = "print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)"
    child = program(code)(stdout=subprocess.PIPE)
    with child.process.stdout as stdout:
        assert stdout.readline() == b"True\n"
    child.end(60, ask=False)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_default_timeout_of_the_parents_sockets_is_not_the_childs(program):
    code = """
from shmload._host.frames import take_channel
channel = take_channel(int(sys.argv[1]))
channel.sendall(str(os.get_blocking(channel.fileno())).encode())
"""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    try:
        child = program(code)(channel_timeout_s=60)
    finally:
        socket.setdefaulttimeout(before)
    assert child.channel.recv(100) == b"True"
    assert child.end(60, ask=False) == "exit code 0"


def test_environment_of_a_child_has_nothing_of_systemd(monkeypatch):
    for name in ("LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    assert _environment()["KEPT"] == "1"
    assert not {"LISTEN_FDS", "LISTEN_PID", "NOTIFY_SOCKET"} & _environment().keys()
