"""The service refuses bad frames, requests and loans, leaks nothing, and keeps serving."""

import contextlib
import os
import random
import socket

import pytest
from serving import held_by, raw_client, read_to_the_end, wait_until_alone

import shmload
from shmload._decoding.job import Job
from shmload._ipc.frames import Inbox, to_frame
from shmload._segments.pieces import Run
from shmload._segments.roots import Root
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import (
    Attached,
    Decode,
    Decoded,
    GetStatus,
    Lend,
    Refused,
    Reserve,
    Reserved,
    Stat,
    Status,
    decode_answer,
)

_NBYTES = 4096
_MODEL = Root(path="/the/model")
_PIECES = ((Run(0, 0, _NBYTES, "U8", "U8"),),)


@pytest.fixture
def lent(tmp_path):
    """Descriptors by kind: a shard and a part of one page each, and files that are neither."""
    for name in ("shard", "part"):
        (tmp_path / name).write_bytes(bytes(_NBYTES))
    with contextlib.ExitStack() as closing:

        def opened(path, flags):
            fd = os.open(path, flags)
            closing.callback(os.close, fd)
            return fd

        pipe = os.pipe()
        for fd in pipe:
            closing.callback(os.close, fd)
        part = tmp_path / "part"
        yield {
            "shard": opened(tmp_path / "shard", os.O_RDONLY),
            "part": opened(part, os.O_RDWR),
            "empty": opened(tmp_path / "empty", os.O_RDONLY | os.O_CREAT),
            "read only": opened(part, os.O_RDONLY),
            "appends": opened(part, os.O_RDWR | os.O_APPEND),
            "pipe": pipe[0],
            "pipe's end": pipe[1],
            "directory": opened(tmp_path, os.O_RDONLY),
            "/dev/zero": opened("/dev/zero", os.O_RDWR),
            "/dev/null": opened("/dev/null", os.O_RDWR),
        }


# Frames -------------------------------------------------------------------------------------------


def frames(lend):
    """Return a valid frame of each request, except the one that ends the service."""
    return [
        *map(to_frame, (lend, Decode(_MODEL, 60.0), Reserve(1 << 20, 0), GetStatus())),
        to_frame(Attached(_MODEL, ("a",), ("b",))),
    ]


def garbage(rng, sound):
    """Return bytes that a broken client could send."""
    stream = bytearray().join(rng.choices(sound, k=rng.randint(1, 3)))
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randint(1, 300))
        case 1:
            return bytes(stream[: rng.randrange(1, len(stream))])
        case 2:
            return bytes(stream[rng.randrange(4) :])
        case 3:
            stream[rng.randrange(4)] ^= 1 << rng.randrange(8)
        case _:
            for _ in range(rng.randint(1, 2)):
                stream[rng.randrange(4, len(stream))] = rng.randrange(256)
    return bytes(stream)


def test_service_outlives_any_garbage(service, lent):
    process = service()
    wanted = decode(lent)
    before = held_by(process)
    rng = random.Random(20)
    sound = frames(Lend("shard", Stat(_NBYTES, 1, 1, 1), _NBYTES, _PIECES))
    for _ in range(250):
        fds = rng.choices(list(lent.values()), k=rng.choice([0, 1, 2, 2, 3, 9, 17, 40]))
        # A client that the service drops before it has sent all finds the socket closed.
        with raw_client() as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(client, [garbage(rng, sound)], fds)
            if rng.random() < 0.8:
                client.shutdown(socket.SHUT_WR)
                read_to_the_end(client)
    assert decode(lent) == wanted
    wait_until_alone(process, before)
    assert "Traceback" not in process.errors
    with Client(socket_path()) as client:
        assert client.ask(Reserve(1, 0), Reserved) == Reserved(())


def answer_of(client):
    """Return the answer to a decode, or None if the service closed the connection."""
    inbox = Inbox(client)
    while True:
        while (frame := inbox.next_frame()) is not None:
            answer = decode_answer(frame)
            if isinstance(answer, Decoded | Refused):
                return answer
        with contextlib.suppress(ConnectionResetError):
            if inbox.receive():
                continue
        return None


@pytest.mark.slow
def test_damaged_loan_is_decoded_or_refused_by_its_own_error(service, lent):
    process = service()
    wanted = decode(lent)
    before = held_by(process)
    rng = random.Random(21)
    sound = to_frame(Lend("shard", Stat(_NBYTES, 1, 1, 1), _NBYTES, _PIECES))
    answers = set()
    for _ in range(150):
        frame = bytearray(sound)
        for _ in range(rng.randint(1, 2)):
            frame[rng.randrange(sound.index(b"source"), len(frame))] = rng.randrange(256)
        with raw_client() as client:
            fds = [lent["shard"], lent["part"]]
            socket.send_fds(client, [frame + to_frame(Decode(_MODEL, 60.0))], fds)
            answers.add(getattr(answer_of(client), "kind", ""))
    assert answers <= {"", "ArgumentError", "ShardChanged", "ShardTruncated"}
    assert decode(lent) == wanted
    wait_until_alone(process, before)
    assert "Traceback" not in process.errors


# Requests -----------------------------------------------------------------------------------------


def test_absurd_reservation_is_refused_by_its_own_error(service, checkpoint, evicts):
    process = service()
    shmload.warm(checkpoint, torch_dtype="bfloat16")
    with Client(socket_path()) as client:
        with pytest.raises(shmload.SharedMemoryFull):
            client.ask(Reserve(1 << 50, 0), Reserved)
        assert client.ask(GetStatus(), Status).segments == 1
    assert "Traceback" not in process.errors


# Loans --------------------------------------------------------------------------------------------

BEYOND = ((Run(0, 1, _NBYTES, "U8", "U8"),),)
LOANS = {
    "shard is a pipe": ({"source": "pipe"}, shmload.ShardUnreadable),
    "shard is a directory": ({"source": "directory"}, shmload.ShardUnreadable),
    "shard is /dev/zero": ({"source": "/dev/zero"}, shmload.ShardUnreadable),
    "shard ends early": ({"source": "empty"}, shmload.ShardTruncated),
    "part is a pipe": ({"part": "pipe's end"}, shmload.ArgumentError),
    "part is a directory": ({"part": "directory"}, shmload.ArgumentError),
    "part is /dev/null": ({"part": "/dev/null"}, shmload.ArgumentError),
    "part is read only": ({"part": "read only"}, shmload.ArgumentError),
    "part appends": ({"part": "appends"}, shmload.ArgumentError),
    "part is smaller": ({"nbytes": 2 * _NBYTES}, shmload.ArgumentError),
    "piece beyond the part": ({"pieces": BEYOND}, shmload.ArgumentError),
}


def decode(lent, *, source="shard", part="part", nbytes=_NBYTES, pieces=_PIECES):
    """Lend a shard and its part; return the digests of the decoded pieces."""
    found = os.fstat(lent["shard"])
    job = Job(
        path="/the/shard",
        source_fd=lent[source],
        source=Stat(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_nlink),
        part_fd=lent[part],
        nbytes=nbytes,
        pieces=pieces,
    )
    with Client(socket_path()) as client:
        return client.decode(_MODEL, [job], lambda nbytes: None, bool)


@pytest.mark.slow
def test_loan_of_the_wrong_kind_is_refused_by_its_own_error(service, lent):
    process = service()
    wanted = decode(lent)
    before = held_by(process)
    for what, (changes, kind) in LOANS.items():
        with pytest.raises(shmload.ShmloadError) as caught:
            decode(lent, **changes)
        assert type(caught.value) is kind, what
        assert "/the/shard" in str(caught.value)
        assert decode(lent) == wanted
    assert os.fstat(lent["part"]).st_size == _NBYTES
    wait_until_alone(process, before)
    assert "Traceback" not in process.errors


def test_descriptors_too_few_or_too_many_end_the_session(service, lent):
    process = service()
    decode(lent)
    before = held_by(process)
    lend = to_frame(Lend("/the/shard", Stat(_NBYTES, 1, 1, 1), _NBYTES, _PIECES))
    fds = [lent["shard"], lent["part"]]
    for frame, sent in [
        (lend, []),
        (lend, fds[:1]),
        (lend, fds + fds),
        (to_frame(GetStatus()), fds),
        (lend[:-1], fds * 9),
        (lend, fds * 100),
    ]:
        with raw_client() as client:
            socket.send_fds(client, [frame], sent)
            read_to_the_end(client)  # the service closes the connection
    wait_until_alone(process, before)
