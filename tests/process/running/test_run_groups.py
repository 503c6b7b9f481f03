"""`shmload run` without a terminal: what a program leaves behind."""

import os
import select
import signal
import subprocess
import sys

import pytest

_DEADLINE_S = 60.0
# A program with a child; both say which signals they get.
_PAIR = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"got by %d\\n" % os.getpid()))
if os.fork() == 0:
    print(os.getppid(), os.getpid(), flush=True)
while True:
    time.sleep(99)
"""


@pytest.fixture
def pair(running):
    """Start a program with a child, without a terminal; return its caller, and both by pidfd."""
    running.start_template(["json"])
    started, held = [], []

    def start():
        caller = subprocess.Popen(
            [sys.executable, "-m", "shmload", "run", "-v", "-c", _PAIR],
            cwd=running.work, env=running.environment, start_new_session=True, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(caller)
        pids = list(map(int, caller.stdout.readline().split()))
        assert pids[0] != caller.pid, caller.stderr.read()
        held.extend(map(os.pidfd_open, pids))
        return caller, held[-2], held[-1], pids

    yield start
    for fd in held:  # first, since each has the pipes of its caller
        if not has_ended(fd, 0):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            assert has_ended(fd)
        os.close(fd)
    for caller in started:
        caller.kill()
        caller.communicate()


def has_ended(fd, timeout_s=_DEADLINE_S):
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_killed_caller_takes_the_group_of_its_program_with_it(pair):
    caller, program, child, _ = pair()
    caller.kill()
    assert has_ended(program)
    assert has_ended(child)
