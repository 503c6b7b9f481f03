"""A peer at the service's socket that lies, is silent, or is another program does no harm."""

import gc
import os
import socket
import subprocess
import sys

import pytest
from children import run_to_end
from serving import drip, wait_until
from weight import assert_right

import shmload
from shmload._ipc.frames import to_frame
from shmload._service.endpoint import socket_path
from shmload._service.protocol import GetStatus, Reserve
from shmload.errors import PeerRefused, ProtocolError, ServiceUnavailable

# A client lies, or does nothing -------------------------------------------------------------------


def raw_client():
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(60)
    client.connect(str(socket_path()))
    return client


def read_to_the_end(client):
    received = b""
    while True:
        try:
            chunk = client.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not chunk:
            return received
        received += chunk


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\x00\x00\x00\x05hello",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["length", "rubbish", "http"],
)
def test_client_that_sends_rubbish_is_put_out(service, sent):
    service()
    with raw_client() as client:
        client.sendall(sent)
        read_to_the_end(client)
    wait_until(lambda found: found.clients == 0)


def test_half_a_request_has_a_deadline(service, configure):
    configure(service_timeout_s=0.3)
    service()
    with raw_client() as client:
        client.sendall(to_frame(GetStatus())[:-1])
        read_to_the_end(client)


def test_request_that_comes_byte_by_byte_has_a_deadline(service, configure):
    configure(service_timeout_s=0.3)
    service()
    with raw_client() as client:
        drip(client, (1 << 25).to_bytes(4, "big"))


def test_client_that_reads_nothing_does_not_hold_up_others(service, shard):
    service()
    with raw_client() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.sendall(b"".join([to_frame(GetStatus())] * 2000))
        client.sendall(to_frame(Reserve(1, 0)))
        assert_right(shmload.load_state_dict(shard, "bfloat16"))


# A stranger ---------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_other_users_are_refused(service):
    service()
    for folder in socket_path().parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    socket_path().chmod(0o777)
    code = (
        "import socket, sys\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "client.connect(sys.argv[1])\n"
        "print(len(client.recv(100)))"
    )
    command = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-I", "-c", code]
    run = run_to_end([*command, str(socket_path())])
    assert run.stdout.strip() == "0", run.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_service_of_another_user_is_not_used(configure, tmp_path, shard):
    configure(service="require", socket=tmp_path / "service.sock", inline_nbytes=0)
    code = (
        "import socket, sys\n"
        "listener = socket.socket(fileno=int(sys.argv[1]))\n"
        "listener.listen()\n"
        "print('LISTENING', flush=True)\n"
        "listener.accept()\n"
        "sys.stdin.readline()"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
        process = subprocess.Popen(
            [
                *("setpriv", "--reuid=65534", "--clear-groups"),
                *(sys.executable, "-I", "-c", code, str(listener.fileno())),
            ],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout.readline() == b"LISTENING\n"
            with pytest.raises(PeerRefused):
                shmload.load_state_dict(shard, "bfloat16")
            process.kill()


def test_service_of_another_version_is_not_used(configure, tmp_path, shard, child):
    configure(service="require", socket=tmp_path / "service.sock", inline_nbytes=0)
    fake = child(
        "import socket, sys\n"
        "from shmload._ipc.frames import to_frame\n"
        "from shmload._service.protocol import Welcome\n"
        "listener = socket.socket(socket.AF_UNIX)\n"
        "listener.bind(sys.argv[1]); listener.listen()\n"
        "print('LISTENING', flush=True)\n"
        "while True:\n"
        "    client, _ = listener.accept()\n"
        "    client.sendall(to_frame(Welcome(99, 1)))",
        tmp_path / "service.sock",
    )
    fake.expect("LISTENING")
    with pytest.raises(ProtocolError, match="speaks version 99"):
        shmload.load_state_dict(shard, "bfloat16")
    configure(service="auto")
    assert_right(shmload.load_state_dict(shard, "bfloat16"))


def test_stale_socket_means_no_service(configure, tmp_path, shard):
    configure(service="require", socket=tmp_path / "service.sock", inline_nbytes=0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
    with pytest.raises(ServiceUnavailable):
        shmload.load_state_dict(shard, "bfloat16")
    configure(service="auto")
    assert_right(shmload.load_state_dict(shard, "bfloat16"))
    gc.collect()
