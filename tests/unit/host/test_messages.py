"""Frames arrive whole, with their descriptors, however they are cut, or are refused."""

import os
import socket
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._host import frames as frames_module
from shmload._host.frames import Inbox, send
from shmload.errors import ProtocolError
from shmload.workers.messages import Fill, decode_to_worker

_NUMBERS = st.integers(0, 2**63)
MESSAGES = st.builds(Fill, _NUMBERS, _NUMBERS, st.just(()), st.integers(0, 9))


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(20)
        yield ours, theirs


def frames(message):
    """Return the bytes that `send` writes."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, message)
        ours.close()
        return b"".join(iter(lambda: theirs.recv(1 << 16), b""))


@given(st.lists(MESSAGES, max_size=6), st.data())
def test_messages_arrive_whole_however_they_are_cut(messages, data):
    stream = b"".join(map(frames, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    ours, theirs = socket.socketpair()
    received = []
    with ours, theirs:
        inbox = Inbox(theirs)
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            if begin < end:
                ours.sendall(stream[begin:end])
                assert inbox.receive()
                while (frame := inbox.next_frame()) is not None:
                    received.append(frame)
        ours.close()
        assert not inbox.receive()
    assert len(received) == len(messages)
    for frame, message in zip(received, messages, strict=True):
        assert decode_to_worker(frame) == message


def test_frame_may_be_as_long_as_the_limit_and_no_longer(pair, monkeypatch):
    monkeypatch.setattr(frames_module, "_MAX_FRAME_NBYTES", 8)
    ours, theirs = pair
    inbox = Inbox(theirs)
    ours.sendall(b"\0\0\0\x08eight it" + b"\0\0\0\x09nine")
    assert inbox.receive()
    assert inbox.next_frame() == b"eight it"
    with pytest.raises(ProtocolError, match="claims 9 bytes"):
        inbox.next_frame()


def test_length_that_is_only_claimed_takes_no_memory(pair):
    ours, theirs = pair
    inbox = Inbox(theirs)
    ours.sendall((64 << 20).to_bytes(4, "big") + b"x")
    tracemalloc.start()
    try:
        assert inbox.receive()
        assert inbox.next_frame() is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_descriptors_come_with_their_message(pair):
    ours, theirs = pair
    fds = [os.memfd_create(name) for name in ("source", "target")]
    send(ours, Fill(3, 2, (), 1), tuple(fds))
    inbox = Inbox(theirs)
    assert inbox.receive()
    assert decode_to_worker(inbox.next_frame()) == Fill(3, 2, (), 1)
    assert len(inbox.fds) == 2
    try:
        for sent, received in zip(fds, inbox.fds, strict=True):
            assert os.path.samestat(os.fstat(sent), os.fstat(received))
    finally:
        for fd in (*fds, *inbox.fds):
            os.close(fd)
