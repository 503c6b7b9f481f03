"""What templates, callers and programs say to each other arrives whole, or is not understood."""

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._templates import messages, wire
from shmload._templates.messages import VERSION, Call, Program

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\udc80\udcff"))
_PROGRAMS = st.builds(
    Program, st.sampled_from(["script", "code"]), st.binary(), st.lists(st.binary()),
    st.lists(st.binary()), _TEXTS,
)  # fmt: skip
_CALLS = st.builds(
    Call, _PROGRAMS, _TEXTS, st.lists(st.lists(_TEXTS)), st.binary(), st.lists(st.integers()),
    st.integers(), st.integers(), st.integers(), st.integers(), st.integers(0, 1),
)  # fmt: skip


def flat(message):
    return [flat(each) if isinstance(each, messages.Message) else each for each in message]


@given(_CALLS)
def test_message_arrives_as_it_was_sent(call):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(ours), contextlib.closing(theirs):
        messages.send(ours, call)
        arrived, fds = messages.receive(theirs, messages.Go, Call)
    assert (flat(arrived), fds) == (flat(call), [])


def understood(raw, kind):
    """Send a packet and receive it as a message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(ours), contextlib.closing(theirs):
        wire.send(ours, raw)
        return messages.receive(theirs, kind)


@given(st.binary(max_size=40) | st.text("0123:").map(str.encode))
def test_fields_that_are_none_are_not_understood(raw):
    with pytest.raises(wire.NotUnderstood):
        understood(wire.pack([VERSION, "Call", raw]), Call)


@pytest.mark.parametrize(
    "packet", [[VERSION], [VERSION, "Go"], [VERSION, "Go", ["more"]], [VERSION, "Ended", ["x"]]]
)
def test_message_that_lacks_something_is_not_understood(packet):
    with pytest.raises(wire.NotUnderstood):
        understood(wire.pack(packet), messages.Ended if "Ended" in packet else messages.Go)
