"""Messages between the service and its clients arrive unchanged or raise a typed error."""

import contextlib
import inspect
import os
import socket
import traceback
import tracemalloc
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shmload
from shmload._ipc.frames import Inbox, send, to_frame
from shmload._segments.pieces import Run
from shmload._segments.roots import Root
from shmload._service.protocol import (
    Answer,
    Attached,
    GetStatus,
    Lend,
    Refused,
    Request,
    Stat,
    decode_answer,
    decode_request,
    refuse,
    revive,
)
from shmload._wording import printing
from shmload.errors import ProtocolError, ShmloadError

REQUESTS, ANSWERS = typing.get_args(Request), typing.get_args(Answer)


def values(kind):
    """Return a strategy for the values of a field's type."""
    match kind:
        case msgspec.inspect.IntType(ge=least, le=most):
            least, most = (-(2**63) if least is None else least), most or 2**64 - 1
            return st.integers(least, most)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.FloatType(ge=least):
            return st.floats(least, allow_nan=False)
        case msgspec.inspect.StrType():
            return st.text(max_size=8)
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.VarTupleType(item):
            return st.lists(values(item), max_size=3).map(tuple)
        case msgspec.inspect.DictType(key, value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case msgspec.inspect.UnionType(kinds):
            return st.one_of(*map(values, kinds))
        case msgspec.inspect.StructType(cls, fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
    raise AssertionError(kind)


_requests = st.one_of([values(msgspec.inspect.type_info(kind)) for kind in REQUESTS])
_answers = st.one_of([values(msgspec.inspect.type_info(kind)) for kind in ANSWERS])


def body(message):
    """Return the bytes of a message in its frame."""
    return to_frame(message)[4:]


def one_of_each(kinds):
    """Return one message of each kind, the simplest with a value in every field."""
    return [sample(msgspec.inspect.type_info(kind)) for kind in kinds]


def sample(kind):
    match kind:
        case msgspec.inspect.VarTupleType(item):
            return (sample(item),)
        case msgspec.inspect.DictType(key, value):
            return {sample(key): sample(value)}
        case msgspec.inspect.UnionType(kinds):
            return sample(kinds[0])
        case msgspec.inspect.StructType(cls, fields):
            return cls(**{field.name: sample(field.type) for field in fields})
        case msgspec.inspect.StrType():
            return "ab"
        case msgspec.inspect.BoolType():
            return True
    return 300


# Frames -------------------------------------------------------------------------------------------


@given(st.lists(_requests | _answers, max_size=4))
def test_every_message_arrives_as_it_was_sent(messages):
    with pair() as (ours, theirs):
        inbox = Inbox(theirs)
        for message in messages:
            send(ours, message)
            while (frame := inbox.next_frame()) is None:
                assert inbox.receive()
            decode = decode_request if isinstance(message, REQUESTS) else decode_answer
            assert decode(frame) == message
        assert inbox.is_empty


@pytest.mark.parametrize(
    ("decode", "kinds", "message"),
    [
        *((decode_request, REQUESTS, message) for message in one_of_each(REQUESTS)),
        *((decode_answer, ANSWERS, message) for message in one_of_each(ANSWERS)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, msgspec.Struct) else "",
)
def test_every_cut_and_every_changed_byte_is_a_message_or_a_protocol_error(decode, kinds, message):
    frame = body(message)
    assert decode(frame) == message
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:length])
    changed = bytearray(frame)
    for place, was in enumerate(frame):
        for value in {was ^ 1 << bit for bit in range(8)} | {0x00, 0x7F, 0x80, 0xC1, 0xDF, 0xFF}:
            changed[place] = value
            with contextlib.suppress(ProtocolError):
                assert isinstance(decode(bytes(changed)), kinds)
        changed[place] = was


@settings(max_examples=300)
@given(
    st.binary(max_size=60),
    st.sampled_from([b"", b"\x81\xa4type", body(Attached(Root(path="m"), (), ("a",)))[:-3]]),
)
def test_rubbish_is_a_message_or_a_protocol_error(rubbish, begin):
    for decode, kinds in ((decode_request, REQUESTS), (decode_answer, ANSWERS)):
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode(begin + rubbish), kinds)


_HEAD = body(Attached(Root(path="m"), (), ("a",)))[:-3]  # up to the array
HUGE = 0xFFFFFFFF.to_bytes(4, "big")
WRONG = {
    "nothing": b"",
    "unknown kind": b"\x81\xa4type\xa6Rename",
    "no kind": b"\x80",
    "kind twice": b"\x82\xa4type\xa9GetStatus\xa4type\xa6Decode",
    "kind as number": b"\x81\xa4type\x01",
    "array without end": _HEAD + b"\xdd" + HUGE + b"\xa1a",
    "array of arrays without end": _HEAD + (b"\xdd" + HUGE) * 1000,
    "map without end": b"\xdf" + HUGE + b"\xa4type\xa9GetStatus",
    "text without end": _HEAD + b"\x91\xdb" + HUGE + b"a",
    "bytes instead of text": _HEAD + b"\x91\xc6" + HUGE + b"a",
    "extension": _HEAD + b"\xc9" + HUGE + b"\x01a",
    "text that is not UTF-8": _HEAD + b"\x91\xa2\xff\xfe",
    "nesting without end": _HEAD + b"\x91" * 200_000,
    "nesting in a field that is unknown": b"\x82\xa4type\xa9GetStatus\xa1x" + b"\x91" * 200_000,
    "maps in a field that is unknown": b"\x82\xa4type\xa9GetStatus\xa1x" + b"\x81\xa1a" * 200_000,
    "a number above 64 bits": b"\x82\xa4type\xa7Reserve\xa6nbytes\xc4\x09" + b"\xff" * 9,
    "a fraction": b"\x82\xa4type\xa7Reserve\xa6nbytes\xcb\x3f\xf8" + bytes(6),
    "a number below zero": b"\x82\xa4type\xa7Reserve\xa6nbytes\xff",
    "two messages in one": body(GetStatus()) * 2,
}


@pytest.mark.parametrize("decode", [decode_request, decode_answer])
@pytest.mark.parametrize("frame", WRONG.values(), ids=WRONG)
def test_wrong_frame_is_a_protocol_error_and_takes_no_memory(decode, frame):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_each_side_refuses_the_others_messages():
    for message in one_of_each(REQUESTS):
        with pytest.raises(ProtocolError, match="restart it with"):
            decode_answer(body(message))
    for message in one_of_each(ANSWERS):
        with pytest.raises(ProtocolError):
            decode_request(body(message))


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
    runs = tuple(Run(number, number, 1, "U8", "U8") for number in range(100_000))
    lend = Lend("path", Stat(1, 1, 1, 1), 1, (runs,))
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


@given(values(msgspec.inspect.type_info(Refused)))
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
