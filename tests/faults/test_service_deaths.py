"""Whoever dies, stops or lies on either side of the service's socket harms nobody else."""

import gc
import os
import select
import signal
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from serving import SERVE, status, stopped, workers_of

import shmload
from shmload._client import Client
from shmload._endpoint import socket_path
from shmload._errors import PeerRefused, ProtocolError, ServiceUnavailable
from shmload._messages import to_frame
from shmload._protocol import GetStatus, Lend, Stat, Status, Warm, Warmed
from shmload._session import ProgressStream, has_hung_up

_VALUES = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3))
_LOAD = """
import sys, shmload
state = shmload.load_state_dict(sys.argv[1], "bfloat16")
print("SUM", float(state["weight"].double().sum()), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": _VALUES}, path)
    return path


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"weight": _VALUES + 1}, path)
    return path


def assert_right(state):
    assert torch.equal(state["weight"], _VALUES.bfloat16())


def wait_until(is_so):
    """Ask the service again and again, which is all that can be done from outside."""
    while not is_so(status()):
        pass


def wait_for_end(pid):
    with_pidfd = os.pidfd_open(pid)
    try:
        assert select.select([with_pidfd], [], [], 60)[0]
    finally:
        os.close(with_pidfd)


@pytest.fixture
def at_work(service, child, checkpoint, configure):
    """A service whose only worker stands still, and a client whose load it has; in this order."""
    configure(stall_timeout_s=60)
    process = service("--workers", "1")
    shmload.warm(checkpoint, torch_dtype="float16")  # the worker is ready
    with stopped(*workers_of(process)):
        client = child(_LOAD, checkpoint)
        wait_until(lambda found: found.is_decoding)
        yield process, client


# The service dies ---------------------------------------------------------------------------------


def test_killed_service_costs_its_clients_nothing(service, checkpoint):
    process = service()
    state = shmload.load_state_dict(checkpoint, "bfloat16")
    process.process.kill()
    process.wait()
    assert_right(state)
    assert shmload.segments()[0].is_leased
    service()
    assert shmload.warm(checkpoint, torch_dtype="bfloat16").read_nbytes == 0
    assert status().read_nbytes == 0


def test_load_goes_on_without_a_service_that_is_killed(at_work):
    process, client = at_work
    process.process.kill()
    assert float(client.expect("SUM")) == float(_VALUES.bfloat16().double().sum())


def test_service_that_is_told_to_end_in_the_middle_hands_over_nothing_half(at_work, checkpoint):
    process, client = at_work
    process.process.terminate()
    assert float(client.expect("SUM")) == float(_VALUES.bfloat16().double().sum())
    for info in shmload.verify():
        assert_right(shmload.load_state_dict(info.source, "bfloat16"))


def test_workers_of_a_killed_service_end(service):
    process = service("--workers", "2")
    workers = workers_of(process)
    fds = [os.pidfd_open(pid) for pid in workers]
    process.process.kill()
    for fd in fds:
        assert select.select([fd], [], [], 60)[0]
        os.close(fd)
    assert len(fds) == 2


def test_load_that_requires_the_service_fails_with_it(at_work, configure, child, other):
    process, client = at_work
    configure(service="require")
    waiting = child(_LOAD, other)
    wait_until(lambda found: found.waiting == 1)
    process.process.kill()
    assert waiting.wait() == 1
    assert "ServiceUnavailable" in waiting.errors
    client.expect("SUM")


def test_service_that_stands_still_is_given_up(service, checkpoint, configure):
    process = service()
    configure(service_timeout_s=0.5)
    with stopped(process.pid):
        assert_right(shmload.load_state_dict(checkpoint, "bfloat16"))
    configure(service_timeout_s=10)
    assert status().misses == 0


def test_service_that_stops_in_the_middle_is_given_up(
    service,
    checkpoint,
    child,
    configure,
):
    process = service("--workers", "1")
    shmload.warm(checkpoint, torch_dtype="float16")
    configure(stall_timeout_s=1)
    with stopped(*workers_of(process)):
        client = child(_LOAD, checkpoint)
        wait_until(lambda found: found.is_decoding)
        with stopped(process.pid):
            assert float(client.expect("SUM")) == float(_VALUES.bfloat16().double().sum())


def test_one_of_many_starts_serves(service, child):
    processes = {child(SERVE) for _ in range(4)}
    waiting = {each.process.stdout: each for each in processes}
    ended = set()
    while len(ended) < 3:
        for stdout in select.select(list(waiting), [], [], 60)[0]:
            each = waiting.pop(stdout)
            if "a service is running" in each.errors:
                ended.add(each)
    (left,) = processes - ended
    assert status().pid == left.pid


def test_leftovers_of_a_killed_service_are_taken_over(service):
    first = service()
    first.process.kill()
    first.wait()
    assert socket_path().exists()
    assert service().pid == status().pid


# A client dies ------------------------------------------------------------------------------------


def test_killed_client_gives_its_lease_back(service, child, checkpoint):
    service()
    client = child(_LOAD, checkpoint)
    client.expect("SUM")
    assert status().leases[0].pids == (client.pid,)
    client.process.kill()
    client.wait()
    assert status().leases == ()
    assert len(shmload.evict(checkpoint)) == 1


def test_lease_goes_with_the_last_process_that_has_it(service, child, checkpoint):
    service()
    client = child(
        "import os, sys, shmload\n"
        "state = shmload.load_state_dict(sys.argv[1], 'bfloat16')\n"
        "pid = os.fork()\n"
        "if pid: print('FORKED', pid, flush=True)\n"
        "sys.stdin.readline()",
        checkpoint,
    )
    forked = int(client.expect("FORKED"))
    client.process.kill()
    client.wait()
    with pytest.raises(shmload.SegmentBusy):
        shmload.evict(checkpoint)
    pidfd = os.pidfd_open(forked)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
    assert len(shmload.evict(checkpoint)) == 1


def test_client_killed_in_the_middle_holds_up_nobody(at_work, other, checkpoint):
    process, client = at_work
    client.process.kill()
    client.wait()
    # The worker that stood still at its piece goes, and the next client has another.
    assert torch.equal(
        shmload.load_state_dict(other, "bfloat16")["weight"], (_VALUES + 1).bfloat16()
    )
    assert_right(shmload.load_state_dict(checkpoint, "bfloat16"))
    assert status().pid == process.pid


def test_telling_a_client_that_has_left_is_no_failure():
    # Else its load's end would be logged as an error of the service, by chance.
    ours, theirs = socket.socketpair()
    with ours:
        stream = ProgressStream(ours)
        theirs.close()
        stream.report(1, 2)
        assert has_hung_up(ours)


def test_worker_that_died_while_idle_is_replaced(service, checkpoint):
    process = service("--workers", "1")
    shmload.warm(checkpoint, torch_dtype="float16")
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGKILL)
    assert_right(shmload.load_state_dict(checkpoint, "bfloat16"))
    assert status().misses == 2


def test_worker_killed_in_the_middle_is_replaced(at_work):
    process, client = at_work
    for worker in workers_of(process):
        os.kill(worker, signal.SIGKILL)
    client.expect("SUM")
    assert status().misses == 2


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
        to_frame(Lend("x", Stat(1, 1, 1, 1), 1, ())),  # without its descriptors
    ],
    ids=["length", "rubbish", "http", "no descriptors"],
)
def test_client_that_sends_rubbish_is_put_out(service, sent):
    service()
    with raw_client() as client:
        client.sendall(sent)
        read_to_the_end(client)
    wait_until(lambda found: found.clients == 1)


def test_half_a_request_has_a_deadline(service, configure):
    configure(service_timeout_s=0.3)
    service()
    with raw_client() as client:
        client.sendall(to_frame(GetStatus())[:-1])
        read_to_the_end(client)


def test_client_that_reads_nothing_holds_up_nobody(service, checkpoint, other):
    service()
    with raw_client() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client.sendall(b"".join([to_frame(GetStatus())] * 2000))
        client.sendall(to_frame(Warm(str(other), "bfloat16")))
        assert_right(shmload.load_state_dict(checkpoint, "bfloat16"))


def test_descriptors_of_a_client_that_leaves_are_closed(service, checkpoint):
    process = service()
    before = len(os.listdir(f"/proc/{process.pid}/fd"))
    for _ in range(3):
        with raw_client() as client, open(checkpoint, "rb") as file:
            frame = to_frame(Lend("x", Stat(1, 1, 1, 1), 1, ()))
            socket.send_fds(client, [frame], [file.fileno(), file.fileno()])
    wait_until(lambda found: found.clients == 1)
    with Client(socket_path()) as client:
        client.ask(GetStatus(), Status)
        assert len(os.listdir(f"/proc/{process.pid}/fd")) <= before + 1


def test_runs_that_point_outside_are_an_error(service, checkpoint, child):
    process = service()
    for _ in range(2):
        with pytest.raises(shmload.ShmloadError), Client(socket_path()) as client:
            client.ask(Warm("\0"), Warmed)
    assert status().pid == process.pid


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_other_users_are_refused(service):
    service()
    for folder in (socket_path().parent, *list(socket_path().parents)[1:4]):
        folder.chmod(0o755)
    socket_path().chmod(0o777)
    code = (
        "import socket, sys\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "client.connect(sys.argv[1])\n"
        "print(len(client.recv(100)))"
    )
    command = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-I", "-c", code]
    run = subprocess.run(
        [*command, str(socket_path())], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout.strip() == "0", run.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_service_of_another_user_is_not_used(configure, tmp_path, checkpoint):
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
                shmload.load_state_dict(checkpoint, "bfloat16")
            process.kill()


def test_service_of_another_version_is_not_used(configure, tmp_path, checkpoint, child):
    configure(service="require", socket=tmp_path / "service.sock", inline_nbytes=0)
    fake = child(
        "import socket, sys\n"
        "from shmload._messages import to_frame\n"
        "from shmload._protocol import Welcome\n"
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
        shmload.load_state_dict(checkpoint, "bfloat16")
    configure(service="auto")
    assert_right(shmload.load_state_dict(checkpoint, "bfloat16"))


def test_nobody_listens_at_a_stale_socket(configure, tmp_path, checkpoint):
    configure(service="require", socket=tmp_path / "service.sock", inline_nbytes=0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
    with pytest.raises(ServiceUnavailable):
        shmload.load_state_dict(checkpoint, "bfloat16")
    configure(service="auto")
    assert_right(shmload.load_state_dict(checkpoint, "bfloat16"))
    gc.collect()
