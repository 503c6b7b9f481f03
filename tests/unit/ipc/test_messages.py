"""Frames and messages between a coordinator and its workers arrive intact or are refused."""

import contextlib
import os
import socket
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._ipc.frames import Inbox, send
from shmload._segments.pieces import Run
from shmload.errors import ProtocolError
from shmload.workers.messages import (
    VERSION,
    BytesRead,
    Close,
    Failed,
    Fill,
    Filled,
    Open,
    Ready,
    Reason,
    decode_from_worker,
    decode_to_worker,
)

_numbers = st.integers(0, 2**63 - 1)
_runs = st.builds(Run, _numbers, _numbers, _numbers, st.text(max_size=4), st.text(max_size=4))
TO_WORKER = st.one_of(
    st.builds(Open, _numbers, _numbers),
    st.builds(Close, _numbers),
    st.builds(Fill, _numbers, _numbers, st.lists(_runs, max_size=4).map(tuple)),
)
FROM_WORKER = st.one_of(
    st.builds(Ready, _numbers, _numbers),
    st.builds(BytesRead, _numbers),
    st.builds(Filled, _numbers, _numbers, st.binary(max_size=16)),
    st.builds(Failed, _numbers, _numbers, st.sampled_from(Reason), st.text(max_size=40), _numbers),
)


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


@given(st.lists(st.one_of(TO_WORKER, FROM_WORKER), max_size=6), st.data())
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
        is_to_worker = isinstance(message, Open | Close | Fill)
        assert (decode_to_worker if is_to_worker else decode_from_worker)(frame) == message


def test_frame_may_be_as_long_as_the_limit_and_no_longer(pair):
    ours, theirs = pair
    inbox = Inbox(theirs, max_frame_nbytes=8)
    ours.sendall(b"\0\0\0\x08eight it" + b"\0\0\0\x09nine")
    assert inbox.receive()
    assert inbox.next_frame() == b"eight it"
    with pytest.raises(ProtocolError, match="claims 9 bytes"):
        inbox.next_frame()


@given(st.binary(max_size=100))
def test_rubbish_is_a_protocol_error_on_both_sides(frame):
    for decode in (decode_to_worker, decode_from_worker):
        with pytest.raises(ProtocolError):
            decode(frame)


@given(TO_WORKER, st.data())
def test_damaged_message_to_a_worker_is_a_message_or_a_protocol_error(message, data):
    frame = damage(frames(message)[4:], data)
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_to_worker(frame), Open | Close | Fill)


@given(FROM_WORKER, st.data())
def test_damaged_message_from_a_worker_is_a_message_or_a_protocol_error(message, data):
    frame = damage(frames(message)[4:], data)
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_from_worker(frame), Ready | BytesRead | Filled | Failed)


def damage(frame, data):
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    return (
        bytes(changed[: data.draw(st.integers(0, len(frame)))])
        if data.draw(st.booleans())
        else bytes(changed)
    )


@pytest.mark.parametrize("decode", [decode_to_worker, decode_from_worker])
@pytest.mark.parametrize(
    "frame",
    {
        "nothing": b"",
        "text that is not UTF-8": b"\x82\xa4type\xa4Open\xa2\xff\xfe\x01",
        "kind that is not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
        "detail that is not UTF-8": frames(Failed(1, 2, Reason.INTERNAL, "detail"))[4:].replace(
            b"\xa6detail\xa6detail", b"\xa6detail\xa6\xff\xfe\xff\xfe\xff\xfe"
        ),
        "nesting without end": b"\x83\xa4type\xa5Ready\xa7version\x01\xa1x" + b"\x91" * 200_000,
        "unknown kind": b"\x81\xa4type\xa6Rename",
        "kind of the other direction's base": b"\x81\xa4type\xa7Message",
        "no kind": b"\x81\xa5shard\x01",
        "number as text": b"\x82\xa4type\xa4Open\xa5shard\xa11",
        "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system",
        "two messages in one": frames(Open(1, 2))[4:] * 2,
    }.items(),
    ids=lambda item: item[0],
)
def test_wrong_frame_is_a_protocol_error(decode, frame):
    with pytest.raises(ProtocolError):
        decode(frame[1])


def test_each_side_refuses_the_others_messages():
    with pytest.raises(ProtocolError):
        decode_to_worker(frames(Ready(VERSION, 1))[4:])
    with pytest.raises(ProtocolError):
        decode_from_worker(frames(Open(1, 2))[4:])


def test_absurd_length_is_refused_before_anything_is_kept(pair):
    ours, theirs = pair
    inbox = Inbox(theirs)
    ours.sendall((0xFFFFFFFF).to_bytes(4, "big"))
    assert inbox.receive()
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
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


def test_half_a_frame_is_no_message(pair):
    ours, theirs = pair
    inbox = Inbox(theirs)
    whole = frames(BytesRead(7))
    ours.sendall(whole[:-1])
    assert inbox.receive()
    assert inbox.next_frame() is None
    ours.close()
    assert not inbox.receive()
    assert inbox.next_frame() is None


def test_descriptors_come_with_their_message(pair):
    ours, theirs = pair
    fds = [os.memfd_create(name) for name in ("source", "target")]
    send(ours, Open(3, 2), tuple(fds))
    inbox = Inbox(theirs)
    assert inbox.receive()
    assert decode_to_worker(inbox.next_frame()) == Open(3, 2)
    assert len(inbox.fds) == 2
    try:
        for sent, received in zip(fds, inbox.fds, strict=True):
            assert os.path.samestat(os.fstat(sent), os.fstat(received))
    finally:
        for fd in (*fds, *inbox.fds):
            os.close(fd)


def test_peer_that_is_gone_is_an_end_of_file(pair):
    ours, theirs = pair
    # Closing with unread bytes in the socket resets the connection.
    theirs.sendall(b"unread")
    ours.close()
    assert not Inbox(theirs).receive()
