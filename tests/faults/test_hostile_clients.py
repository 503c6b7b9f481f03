"""The service refuses bad frames and requests, leaks nothing, and keeps serving."""

import contextlib
import os
import random
import socket

import pytest
from serving import held_by, raw_client, read_to_the_end, wait_until_alone

import shmload
from shmload._ipc.frames import to_frame
from shmload._segments.roots import Root
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import (
    Attached,
    GetStatus,
    Reserve,
    Reserved,
    Settle,
    Status,
)

_MODEL = Root(path="/the/model")


# Frames -------------------------------------------------------------------------------------------


def frames():
    """Return a valid frame of each request, except the one that ends the service."""
    return [
        *map(to_frame, (Reserve(1 << 20, 0, _MODEL), Settle(), GetStatus())),
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


def test_service_outlives_any_garbage(service):
    process = service()
    before = held_by(process)
    rng = random.Random(20)
    sound = frames()
    null = os.open("/dev/null", os.O_RDWR)
    for _ in range(250):
        fds = [null] * rng.choice([0, 0, 0, 1, 9, 40])
        # A client that the service drops before it has sent all finds the socket closed.
        with raw_client() as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(client, [garbage(rng, sound)], fds)
            if rng.random() < 0.8:
                client.shutdown(socket.SHUT_WR)
                read_to_the_end(client)
    os.close(null)
    wait_until_alone(process, before)
    assert "Traceback" not in process.errors
    with Client(socket_path()) as client:
        assert client.ask(Reserve(1, 0), Reserved) == Reserved(())


# Requests -----------------------------------------------------------------------------------------


def test_absurd_reservation_is_refused_by_its_own_error(service, checkpoint, evicts):
    process = service()
    shmload.warm(checkpoint, torch_dtype="bfloat16")
    with Client(socket_path()) as client:
        with pytest.raises(shmload.SharedMemoryFull):
            client.ask(Reserve(1 << 50, 0), Reserved)
        assert client.ask(GetStatus(), Status).segments == 1
    assert "Traceback" not in process.errors


@pytest.mark.slow
def test_descriptors_that_no_request_takes_end_the_session(service):
    process = service()
    with Client(socket_path()):
        pass
    wait_until_alone(process, before := held_by(process))
    frame = to_frame(GetStatus())
    with open("/dev/null") as file:
        for sent in (frame, frame[:-1]):
            for count in (1, 9, 100):
                with raw_client() as client:
                    socket.send_fds(client, [sent], [file.fileno()] * count)
                    read_to_the_end(client)  # the service closes the connection
    wait_until_alone(process, before)
