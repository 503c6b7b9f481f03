"""Whatever a frame holds, each side of each protocol reads a message of the other or refuses it."""

import contextlib
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmload._host.frames import to_frame
from shmload._segments.pieces import Run
from shmload.errors import ProtocolError
from shmload.workers import messages as workers

# What one side sends, and what the other reads it with.
SIDES = {
    "to a worker": (workers.Fill, workers.decode_to_worker),
    "from a worker": (workers.FromWorker, workers.decode_from_worker),
}


def body(message):
    """Return the bytes of a message in its frame."""
    return to_frame(message)[4:]


SAMPLES = [
    ("to a worker", workers.Fill(300, 300, (Run(300, 300, 300, "ab", "ab"),), 300)),
    ("from a worker", workers.Ready(300)),
    ("from a worker", workers.BytesRead(300)),
    ("from a worker", workers.Filled(300, 300, b"ab")),
    ("from a worker", workers.Failed(300, 300, workers.Reason.CHANGED, "ab", 300)),
]


@pytest.mark.parametrize(("side", "message"), SAMPLES, ids=lambda value: type(value).__name__)
def test_every_cut_and_every_changed_byte_is_a_message_or_a_protocol_error(side, message):
    decode, frame = SIDES[side][1], body(message)
    assert decode(frame) == message
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode(frame[:length])
    changed = bytearray(frame)
    for place, was in enumerate(frame):
        for value in {was ^ 1 << bit for bit in range(8)} | {0x00, 0x7F, 0x80, 0xC1, 0xDF, 0xFF}:
            changed[place] = value
            with contextlib.suppress(ProtocolError):
                assert isinstance(decode(bytes(changed)), SIDES[side][0])
        changed[place] = was


_HEAD = body(workers.Fill(1, 2, (), 1))
_HEAD = _HEAD[: _HEAD.index(b"runs") + 4]  # up to the array


@settings(max_examples=300)
@given(st.binary(max_size=60), st.sampled_from([b"", b"\x81\xa4type", _HEAD]))
def test_rubbish_is_a_message_or_a_protocol_error(rubbish, begin):
    for side, (_, decode) in SIDES.items():
        with contextlib.suppress(ProtocolError):
            assert isinstance(decode(begin + rubbish), SIDES[side][0])


HUGE = 0xFFFFFFFF.to_bytes(4, "big")
WRONG = {
    "nothing": b"",
    "unknown kind": b"\x81\xa4type\xa6Rename",
    "kind of the base": b"\x81\xa4type\xa7Message",
    "kind that is not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "no kind": b"\x80",
    "a field and no kind": b"\x81\xa5shard\x01",
    "kind twice": b"\x82\xa4type\xa4Fill\xa4type\xa5Ready",
    "kind as number": b"\x81\xa4type\x01",
    "number as text": b"\x82\xa4type\xa4Fill\xa5shard\xa11",
    "array without end": _HEAD + b"\xdd" + HUGE + b"\xa1a",
    "array of arrays without end": _HEAD + (b"\xdd" + HUGE) * 1000,
    "map without end": b"\xdf" + HUGE + b"\xa4type\xa5Ready",
    "text without end": _HEAD + b"\x91\xdb" + HUGE + b"a",
    "bytes instead of text": _HEAD + b"\x91\xc6" + HUGE + b"a",
    "extension": _HEAD + b"\xc9" + HUGE + b"\x01a",
    "text that is not UTF-8": _HEAD + b"\x91\xa2\xff\xfe",
    "nesting without end": _HEAD + b"\x91" * 200_000,
    "nesting in a field that is unknown": b"\x82\xa4type\xa4Fill\xa1x" + b"\x91" * 200_000,
    "maps in a field that is unknown": b"\x82\xa4type\xa4Fill\xa1x" + b"\x81\xa1a" * 200_000,
    "a number above 64 bits": b"\x82\xa4type\xa9BytesRead\xa6nbytes\xc4\x09" + b"\xff" * 9,
    "a fraction": b"\x82\xa4type\xa9BytesRead\xa6nbytes\xcb\x3f\xf8" + bytes(6),
    "a pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system",
    "two messages in one": body(workers.Fill(1, 1, (), 1)) * 2,
}


@pytest.mark.parametrize("frame", WRONG.values(), ids=WRONG)
def test_wrong_frame_is_a_protocol_error_and_takes_no_memory(frame):
    tracemalloc.start()
    try:
        for _, decode in SIDES.values():
            with pytest.raises(ProtocolError):
                decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("side", "message"), SAMPLES, ids=lambda value: type(value).__name__)
def test_each_side_refuses_the_others_messages(side, message):
    (other,) = SIDES.keys() - {side}
    with pytest.raises(ProtocolError):
        SIDES[other][1](body(message))
