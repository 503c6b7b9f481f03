"""Who connects to a template and says nothing keeps nobody else away."""

import contextlib
import select

import pytest

from shmload._templates import wire
from shmload._templates.connections import _MAX_SILENT, Connections


def test_oldest_of_too_many_silent_connections_makes_room(tmp_path):
    poll = select.poll()
    connections = Connections(f"{tmp_path}/socket", poll)
    with contextlib.ExitStack() as stack:
        stack.callback(connections.close_all)
        callers = []
        for _ in range(_MAX_SILENT + 1):
            caller = wire.connect(connections.path, 60.0)
            callers.append(stack.enter_context(contextlib.closing(caller)))
            [(fd, _)] = poll.poll()
            assert connections.question_at(fd) is None
        assert callers[0].recv(1) == b""
        callers[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            callers[1].recv(1)
