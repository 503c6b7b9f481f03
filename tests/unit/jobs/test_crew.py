"""What a runner has said before its end is heard, also if its end is reported first."""

import os
import socket
import time
from types import SimpleNamespace

import pytest

from shmload._ipc.frames import Inbox, send
from shmload.integrations._jobs import crew as crews
from shmload.integrations._jobs.messages import Ended, Forked, Prepared, Returned, Started
from shmload.integrations._jobs.payload import dump
from shmload.integrations._jobs.server_process import ServerProcess


class Server(ServerProcess):
    """A fork server without a process: the test says what it and its runners say."""

    def __init__(self, *arguments):
        self.is_prepared = False
        self.since = time.monotonic()
        self.channel, self.theirs = socket.socketpair()
        self.inbox = Inbox(self.channel)
        self.runners = []
        """The runners' ends of their sockets, in the order in which they were asked for."""

    def send(self, message, fds=()):
        self.runners += [socket.socket(fileno=os.dup(fd)) for fd in fds]
        return True

    def close(self):
        for end in (self.channel, self.theirs, *self.runners):
            end.close()
        self.inbox.close()
        return "SIGKILL"


@pytest.fixture
def crew(monkeypatch):
    monkeypatch.setattr(crews, "ServerProcess", Server)
    made = crews.Crew(SimpleNamespace(text=""), ["cpu"], 1, ())
    yield made
    made.close()


def test_answer_that_comes_with_the_end_of_its_runner_is_not_lost(crew):
    server = crew._processes.server
    send(server.theirs, Prepared())
    crew.wait(10)
    (runner,) = crew.runners.values()
    pidfd = os.open("/dev/null", os.O_RDONLY)
    send(server.theirs, Forked(77), (pidfd,))
    os.close(pidfd)
    crew.wait(10)
    answer = Returned(0, dump("result"))
    send(server.runners[0], Started())
    send(server.runners[0], answer)
    ended = Ended(77, "SIGKILL")
    send(server.theirs, ended)
    assert crew.wait(10) == [(runner, Started()), (runner, answer), (runner, ended)]
    # Another was asked for in its place.
    assert len(server.runners) == 2
    assert list(crew.runners.values()) != [runner]
