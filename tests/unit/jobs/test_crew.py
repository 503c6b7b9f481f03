"""What a runner has said before its end is heard; late processes end a map, pauses do not."""

import os
import socket
import time
from types import SimpleNamespace

import pytest

from shmload._ipc.frames import Inbox, send
from shmload._jobs import crew as crews
from shmload._jobs.messages import Answer, Ended, Forked, Prepared, Started
from shmload._jobs.payload import dump
from shmload._jobs.processes import Server
from shmload._settings import settings
from shmload.errors import JobFailed

LATE_S = 1e6


class SilentServer(Server):
    """A fork server without a process: the test says what it and its runners say."""

    def __init__(self, *arguments):
        self.is_prepared = False
        self.since = time.monotonic()
        self.channel, self.theirs = socket.socketpair()
        self.inbox = Inbox(self.channel)
        self.runners = []
        """The runners' ends of their sockets, in the order in which they were asked for."""
        self.kills = 0

    def send(self, message, fds=()):
        self.runners += [socket.socket(fileno=os.dup(fd)) for fd in fds]
        return True

    def kill(self):
        self.kills += 1

    def close(self):
        for end in (self.channel, self.theirs, *self.runners):
            end.close()
        self.inbox.close()
        return "SIGKILL"


@pytest.fixture
def crew(monkeypatch):
    monkeypatch.setattr(crews, "Server", SilentServer)
    made = crews.Crew(SimpleNamespace(text=""), ["cpu"], 1, ())
    yield made
    made.close()


@pytest.fixture
def runner(crew):
    """The crew's runner, forked and not yet started."""
    send(crew._server.theirs, Prepared())
    crew.wait(10)
    pidfd = os.open("/dev/null", os.O_RDONLY)
    send(crew._server.theirs, Forked(77), (pidfd,))
    os.close(pidfd)
    crew.wait(10)
    (made,) = crew.runners.values()
    os.close(made.pidfd)
    made.pidfd = -1  # nothing is to be killed
    return made


def test_answer_that_comes_with_the_end_of_its_runner_is_not_lost(crew, runner):
    server, answer, ended = crew._server, Answer(0, dump("result")), Ended(77, "SIGKILL")
    send(server.runners[0], Started())
    send(server.runners[0], answer)
    send(server.theirs, ended)
    assert crew.wait(10) == [(runner, Started()), (runner, answer), (runner, ended)]
    # Another was asked for in its place.
    assert len(server.runners) == 2
    assert list(crew.runners.values()) != [runner]


# Deadlines ----------------------------------------------------------------------------------------


def test_server_that_is_not_prepared_in_time_is_refused(crew):
    crew.wait(0)
    crew._server.since -= LATE_S
    with pytest.raises(JobFailed, match=f"within {settings().wait_timeout_s:g} s"):
        crew.wait(0)


def test_runner_that_does_not_start_in_time_is_refused(crew, runner):
    crew.wait(0)
    runner.since -= LATE_S
    with pytest.raises(JobFailed, match=f"within {settings().wait_timeout_s:g} s"):
        crew.wait(0)


def start(crew, runner):
    send(crew._server.runners[0], Started())
    crew.wait(10)
    assert runner.is_started


def test_server_that_does_not_report_an_end_in_time_is_killed(crew, runner):
    start(crew, runner)
    runner.expect_end()
    crew.wait(0)
    assert crew._server.kills == 0
    runner.ending_since -= LATE_S
    crew.wait(0)
    assert crew._server.kills == 1
    assert runner.how == "it has closed its socket"


def test_pause_of_this_process_makes_no_other_late(crew, runner, monkeypatch):
    """Neither the server, nor the start, the item or the end of a runner."""
    start(crew, runner)
    runner.expect_end()
    offset_s = 0.0
    clock, select = time.monotonic, crew._selector.select

    def stopped(timeout_s):
        nonlocal offset_s
        offset_s += LATE_S
        return select(timeout_s)

    monkeypatch.setattr(time, "monotonic", lambda: clock() + offset_s)
    monkeypatch.setattr(crew._selector, "select", stopped)
    crew._server.is_prepared = runner.is_started = False
    crew.wait(0)
    assert crew._server.kills == 0
    assert runner.idle_s() < LATE_S / 2
