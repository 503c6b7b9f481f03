"""`shmload top` on a terminal: a pty, in which keys are typed and whose output is read."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
from serving import ask

import shmload
from shmload._service.protocol import Shutdown, Stopping

PROGRAM = "from shmload._cli.main import main; main(['top'])"
# A shell lets its background jobs ignore some of these, and so would the program.
_AS_ON_A_TERMINAL = """
import signal
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
_DEADLINE_S = 60.0
_LEAVES_SCREEN = b"\x1b[?1049l"


class Terminal:
    """A program on a terminal of its own, and what it has written there."""

    def __init__(self, code, **env):
        self.end, self._other = pty.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self._other)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _AS_ON_A_TERMINAL + code],
            stdin=self._other,
            stdout=self._other,
            stderr=self._other,
            start_new_session=True,
            env=os.environ | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"} | env,
        )

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.end)
        os.close(self._other)

    def resize(self, width, height):
        fcntl.ioctl(self._other, termios.TIOCSWINSZ, struct.pack("4H", height, width, 0, 0))

    def type(self, keys):
        os.write(self.end, keys.encode())

    def expect(self, text):
        """Wait until the program has written this; forget all up to it."""
        deadline = time.monotonic() + _DEADLINE_S
        while (found := self.seen.find(text.encode())) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not come; {self.seen[-2000:]!r}"
            if select.select([self.end], [], [], 0.3)[0]:
                self.seen += os.read(self.end, 1 << 16)
        self.seen = self.seen[found + len(text.encode()) :]

    def wait(self):
        """Wait for the program's end; returns its exit code and all that it wrote until then."""
        deadline = time.monotonic() + _DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.end], [], [], 0.05)[0]:
                self.seen += os.read(self.end, 1 << 16)
        while select.select([self.end], [], [], 0)[0]:
            self.seen += os.read(self.end, 1 << 16)
        return self.process.returncode

    @property
    def is_as_before(self):
        return termios.tcgetattr(self._other) == self.before


@pytest.fixture
def terminal():
    """Run a program on a terminal of its own: `terminal(code)`."""
    with contextlib.ExitStack() as closing:
        yield lambda code=PROGRAM, **env: closing.enter_context(
            contextlib.closing(Terminal(code, **env))
        )


@pytest.mark.slow
def test_keys_pin_and_evict_the_chosen_model(service, checkpoint, terminal):
    service()
    shmload.warm(checkpoint, dtype="bfloat16")
    screen = terminal()
    screen.expect("\x1b[?1049h")  # the alternate screen
    screen.expect(checkpoint.name)
    screen.expect("idle")
    screen.type("p")
    screen.expect(f"pinned {checkpoint.name}")
    assert [info.is_pinned for info in shmload.segments()] == [True]
    screen.type("p")
    screen.expect(f"unpinned {checkpoint.name}")
    assert [info.is_pinned for info in shmload.segments()] == [False]
    screen.type("e")
    screen.expect(f"evict {checkpoint.name} (")
    screen.type("y")
    screen.expect("no model is resident")
    assert shmload.segments() == []
    screen.type("q")
    assert screen.wait() == 0
    assert _LEAVES_SCREEN in screen.seen
    assert screen.is_as_before


@pytest.mark.slow
def test_terminal_is_restored_at_a_signal(service, terminal):
    service()
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)
    screens = {number: terminal() for number in numbers}
    for number, screen in screens.items():
        screen.expect("quit")
        screen.process.send_signal(number)
    for screen in screens.values():
        assert screen.wait() == 0
        assert _LEAVES_SCREEN in screen.seen
        assert screen.is_as_before


@pytest.mark.slow
def test_program_ends_with_its_terminal(service, terminal):
    service()
    screen = terminal()
    screen.expect("quit")
    os.close(screen.end)
    screen.end = os.open(os.devnull, os.O_RDONLY)
    screen.process.wait(_DEADLINE_S)  # it may fail, since nothing takes its last output


@pytest.mark.slow
def test_model_in_use_is_not_evicted(service, checkpoint, terminal):
    service()
    state = shmload.load_state_dict(checkpoint, "bfloat16", keep=True)
    screen = terminal()
    screen.expect(f"{os.getpid()} ")
    screen.type("e")
    screen.expect(f"evict {checkpoint.name} (")
    screen.type("y")
    screen.expect(f"{checkpoint.name} is in use by {os.getpid()}")
    assert len(shmload.segments()) == 1
    del state


@pytest.mark.slow
def test_terminal_is_restored_at_an_error(service, terminal):
    service()
    code = "import shmload._cli.top as t; t.Desk.press = lambda *a: 1 / 0\n" + PROGRAM
    screen = terminal(code)
    screen.expect("quit")
    screen.type("x")
    assert screen.wait() == 1
    left, _, after = screen.seen.rpartition(_LEAVES_SCREEN)
    assert left
    assert b"ZeroDivisionError" in after
    assert screen.is_as_before


@pytest.mark.slow
def test_new_size_is_drawn(service, terminal):
    service()
    screen = terminal(COLUMNS="80", LINES="24")  # as some programs leave them to their children
    screen.expect("quit")
    screen.resize(30, 12)
    screen.expect("up/down choose   p pin or unpi\x1b[0m\r\n")  # all that thirty cells hold
    screen.type("q")
    assert screen.wait() == 0


@pytest.mark.slow
def test_service_that_ends_is_said_and_found_again(service, terminal):
    service()
    screen = terminal()
    screen.expect("quit")
    ask(Shutdown(), Stopping)
    screen.expect("no service answers")
    process = service()
    screen.expect(f"process {process.pid}")
    screen.type("q")
    assert screen.wait() == 0


@pytest.mark.slow
def test_terminal_that_cannot_be_drawn_on_gets_lines(service, terminal):
    service()
    for screen in [terminal(TERM=kind) for kind in ("dumb", "unknown", "")]:
        screen.expect("served     0 hits, 0 misses")
        screen.process.send_signal(signal.SIGINT)
        assert screen.wait() == 0
        assert b"\x1b[" not in screen.seen


@pytest.mark.slow
def test_without_a_service_the_reason_is_one_line(configure, terminal, tmp_path):
    configure(socket=tmp_path / "run" / "service.sock")
    screen = terminal()
    assert screen.wait() == 1
    assert screen.seen.count(b"\n") == 1
    assert b"start one with `shmload serve`" in screen.seen
