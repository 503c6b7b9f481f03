"""Messages between the service and its clients arrive unchanged or raise a typed error."""

import contextlib
import inspect
import os
import socket
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from message_values import any_of

import shmload
from shmload._ipc.frames import Inbox, to_frame
from shmload._segments.roots import Root
from shmload._service.protocol import (
    Attached,
    Refused,
    decode_answer,
    decode_request,
    refuse,
    revive,
)
from shmload._wording import printing
from shmload.errors import ProtocolError, ShmloadError


def body(message):
    """Return the bytes of a message in its frame."""
    return to_frame(message)[4:]


# Descriptors --------------------------------------------------------------------------------------


@contextlib.contextmanager
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(20)
        yield ours, theirs


@pytest.fixture
def memfds():
    """Two files to lend; no descriptor of them may be left in this process."""
    before = len(os.listdir("/proc/self/fd"))
    fds = os.memfd_create("source"), os.memfd_create("target")
    yield fds
    for fd in fds:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_of_a_large_frame_come_once(memfds):
    lend = Attached(Root(path="m"), (), tuple(map(str, range(100_000))))
    with pair() as (ours, theirs), contextlib.closing(Inbox(theirs)) as inbox:
        frame = memoryview(to_frame(lend))
        sent = socket.send_fds(ours, [frame[:1000]], memfds)
        ours.setblocking(False)
        while (received := inbox.next_frame()) is None:
            with contextlib.suppress(BlockingIOError):
                sent += ours.send(frame[sent:])
            assert inbox.receive()
        assert decode_request(received) == lend
        assert len(inbox.fds) == 2


def test_unexpected_descriptors_are_refused_and_closed(memfds):
    frame = to_frame(Attached(Root(path="m"), (), ("a" * 1000,)))
    with pair() as (ours, theirs), contextlib.closing(Inbox(theirs)) as inbox:
        with pytest.raises(ProtocolError, match="descriptors"):  # noqa: PT012
            for byte in frame[:-1]:
                socket.send_fds(ours, [bytes([byte])], memfds)
                inbox.receive()
                assert inbox.next_frame() is None
        assert len(inbox.fds) < 20


# Refusals -----------------------------------------------------------------------------------------

EVERY_ERROR = [
    error
    for error in (getattr(shmload, name) for name in shmload.__all__)
    if isinstance(error, type) and issubclass(error, ShmloadError)
]


def make(error):
    """Make an error of a class, with some value for each argument."""
    known = {
        int: 2**40,
        int | None: 5,
        Collection[int]: (7,),
        float: 60.0,
        Iterable[str]: ("first", "second"),
        Mapping[str, Collection[int]]: {"third": (7, 8), "fourth": ()},
        Mapping[str, str] | None: {"fifth": "cuda:0"},
        Mapping[str, Sequence[str]] | None: {"fourth": ("a", "b"), "sixth": ()},
    }
    parameters = list(inspect.signature(error.__init__).parameters.values())[1:]
    kinds = [each.annotation for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    return error(*[known.get(kind, "some/path") for kind in kinds] or ["a sentence"])


def sent(refused):
    """Return the error that a client raises for a refusal."""
    return revive(decode_answer(body(refused)))


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_every_public_error_arrives_with_all_that_it_says(kind):
    error = make(kind)
    error.add_note("a note")
    got = sent(refuse(error))
    assert type(got) is kind
    assert str(got) == str(error)
    assert vars(got) == vars(error)
    assert getattr(got, "errno", None) == getattr(error, "errno", None)
    with pytest.raises(kind):
        raise got


@pytest.mark.parametrize("text", ["a\udcff.safetensors", "\ud800", "\0", ""])
def test_error_about_a_name_that_is_no_text_arrives(text):
    error = shmload.ShardMissing(Path(text), text)
    error.add_note(text)
    got = sent(refuse(error))
    assert type(got) is shmload.ShardMissing
    assert str(got).isprintable()


@given(any_of(msgspec.inspect.type_info(Refused)))
@example(Refused("ShmloadError", "", {"__class__": "x", "__notes__": "x", "add_note": "x"}, ("x",)))
@example(Refused("ShardUnreadable", "", {"args": 1, "__traceback__": "x", "__dict__": 1}, ()))
@example(Refused("CapacityError", "", {"errno": "x", "characters_written": "x"}, ()))
@example(Refused("errno", "a module's name", {}))
@example(Refused("_Path", "no class", {}))
def test_whatever_a_refusal_says_is_an_error_of_this_package(refused):
    error = sent(refused)
    assert isinstance(error, ShmloadError)
    assert str(error) == printing(refused.message)
    assert "".join(traceback.format_exception(error))
