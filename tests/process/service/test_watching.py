"""`shmload status --watch`: pages in a pipe, a screen on a terminal, until Ctrl-C."""

import os
import pty
import select
import signal
import subprocess
import sys

import pytest

import shmload

_WATCH = [sys.executable, "-m", "shmload", "status", "--watch"]


def until_seen(fd, wanted, seen=b""):
    """Read until all this was written, and return what was."""
    while not all(each.encode() in seen for each in wanted):
        assert select.select([fd], [], [], 60)[0], f"{wanted} did not come; {seen!r}"
        seen += os.read(fd, 1 << 16)
    return seen


@pytest.fixture
def watching():
    """Start the command with some output; end it with the test."""
    started = []

    def start(output):
        process = subprocess.Popen(_WATCH, stdout=output, env=os.environ | {"TERM": "xterm"})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_pipe_gets_a_page_each_second(service, checkpoint, watching):
    found = service()
    process = watching(subprocess.PIPE)
    until_seen(process.stdout.fileno(), [f"service    process {found.pid}, up "])
    shmload.warm(checkpoint)
    seen = until_seen(process.stdout.fileno(), [checkpoint.name, "\n\nservice "])
    assert b"\x1b" not in seen
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    process.stdout.close()


def test_terminal_is_given_back(service, watching):
    found = service()
    end, other = pty.openpty()
    try:
        process = watching(other)
        seen = until_seen(end, ["\x1b[?1049h", f"process {found.pid}"])
        found.process.send_signal(signal.SIGTERM)
        seen = until_seen(end, ["no service runs here"], seen)
        process.send_signal(signal.SIGINT)
        until_seen(end, ["\x1b[?1049l"], seen)
        assert process.wait(60) == 0
    finally:
        os.close(end)
        os.close(other)
