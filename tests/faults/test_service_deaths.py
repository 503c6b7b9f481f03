"""A service or client that dies or stops harms no other process."""

import os
import select
import signal
import socket
import sys

import pytest
import torch
from children import run_to_end
from serving import SERVE, status, stopped, wait_until, workers_of
from weight import VALUES, assert_right

import shmload
from shmload._service.endpoint import socket_path
from shmload._service.protocol import BytesRead
from shmload._service.session import ProgressStream, has_hung_up

_LOAD = """
import sys, shmload
state = shmload.load_state_dict(sys.argv[1], "bfloat16")
print("SUM", float(state["weight"].double().sum()), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def at_work(service, child, shard, configure):
    """A service whose only worker is stopped, and a client whose load that worker has."""
    configure(stall_timeout_s=60)
    process = service("--workers", "1")
    shmload.warm(shard, torch_dtype="float16")  # the worker is ready
    with stopped(*workers_of(process)):
        client = child(_LOAD, shard)
        wait_until(lambda found: found.is_decoding)
        before = status().decode_s
        wait_until(lambda found: found.decode_s > before)  # `decode_s` counts up during a decode
        yield process, client


# The service dies ---------------------------------------------------------------------------------


def test_killed_service_costs_its_clients_nothing(service, shard):
    process = service()
    state = shmload.load_state_dict(shard, "bfloat16")
    process.process.kill()
    process.wait()
    assert_right(state)
    assert shmload.segments()[0].is_leased
    service()
    assert shmload.warm(shard, torch_dtype="bfloat16").read_nbytes == 0
    assert status().read_nbytes == 0


def test_load_goes_on_without_a_service_that_is_killed(at_work):
    process, client = at_work
    process.process.kill()
    assert float(client.expect("SUM")) == float(VALUES.bfloat16().double().sum())


@pytest.mark.slow
def test_service_that_is_told_to_end_in_the_middle_hands_over_nothing_half(at_work, shard):
    process, client = at_work
    process.process.terminate()
    assert float(client.expect("SUM")) == float(VALUES.bfloat16().double().sum())
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


@pytest.mark.slow
def test_load_that_requires_the_service_fails_with_it(at_work, configure, child, other_shard):
    process, client = at_work
    configure(service="require")
    waiting = child(_LOAD, other_shard)
    wait_until(lambda found: found.waiting == 1)
    process.process.kill()
    assert waiting.wait() == 1
    assert "ServiceUnavailable" in waiting.errors
    client.expect("SUM")


def test_service_that_stands_still_is_given_up(service, shard, configure):
    process = service()
    configure(service_timeout_s=0.5)
    with stopped(process.pid):
        assert_right(shmload.load_state_dict(shard, "bfloat16"))
    configure(service_timeout_s=10)
    assert status().misses == 0


@pytest.mark.slow
def test_service_that_stops_in_the_middle_is_given_up(
    service,
    shard,
    child,
    configure,
):
    process = service("--workers", "1")
    shmload.warm(shard, torch_dtype="float16")
    configure(stall_timeout_s=1)
    with stopped(*workers_of(process)):
        client = child(_LOAD, shard)
        wait_until(lambda found: found.is_decoding)
        with stopped(process.pid):
            assert float(client.expect("SUM")) == float(VALUES.bfloat16().double().sum())


def test_its_workers_heed_the_deadline_of_the_load(service, shard, configure):
    process = service("--workers", "1")
    shmload.warm(shard, torch_dtype="float16")  # the worker is ready
    configure(stall_timeout_s=0.5)  # the service itself has the default, which is a minute
    with stopped(*workers_of(process)):
        shmload.warm(shard, torch_dtype="bfloat16")
    assert "a worker was lost (WorkerStalled)" in process.errors


@pytest.mark.parametrize("command", ["status", "shutdown", "serve"])
def test_service_that_stands_still_is_named_with_what_ends_it(service, configure, command):
    process = service()
    configure(service_timeout_s=0.5)
    with stopped(process.pid):
        arguments = [sys.executable, "-m", "shmload", command]
        done = run_to_end(arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"shmload: the service at {socket_path()}, process {process.pid}, does not answer in 0.5 s;"
        f" `kill -9 {process.pid}`, then `shmload serve`\n"
    )


def test_one_of_many_starts_serves(service, new_child):
    processes = {new_child(SERVE) for _ in range(4)}
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


def test_killed_client_gives_its_lease_back(service, child, shard):
    service()
    client = child(_LOAD, shard)
    client.expect("SUM")
    assert status().leases[0].pids == (client.pid,)
    client.process.kill()
    client.wait()
    wait_until(lambda found: found.leases == ())
    assert len(shmload.evict(shard)) == 1


def test_lease_goes_with_the_last_process_that_has_it(service, child, shard):
    service()
    client = child(
        "import os, sys, shmload\n"
        "state = shmload.load_state_dict(sys.argv[1], 'bfloat16')\n"
        "pid = os.fork()\n"
        "if pid: print('FORKED', pid, flush=True)\n"
        "sys.stdin.readline()",
        shard,
    )
    forked = int(client.expect("FORKED"))
    client.process.kill()
    client.wait()
    with pytest.raises(shmload.SegmentBusy):
        shmload.evict(shard)
    pidfd = os.pidfd_open(forked)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert select.select([pidfd], [], [], 60)[0]
    os.close(pidfd)
    assert len(shmload.evict(shard)) == 1


@pytest.mark.slow
def test_client_killed_during_its_load_does_not_hold_up_the_next(at_work, other_shard, shard):
    process, client = at_work
    client.process.kill()
    client.wait()
    # The stopped worker is replaced, and the next client gets the new one.
    assert torch.equal(
        shmload.load_state_dict(other_shard, "bfloat16")["weight"], (VALUES + 1).bfloat16()
    )
    assert_right(shmload.load_state_dict(shard, "bfloat16"))
    assert status().pid == process.pid


def test_telling_a_client_that_has_left_is_no_failure():
    # Otherwise the end of its load might be logged as an error of the service.
    ours, theirs = socket.socketpair()
    with ours:
        stream = ProgressStream(ours)
        theirs.close()
        stream.report(BytesRead(1, 2))
        assert has_hung_up(ours)


def test_worker_that_died_while_idle_is_replaced(service, shard):
    process = service("--workers", "1")
    shmload.warm(shard, torch_dtype="float16")
    (worker,) = workers_of(process)
    os.kill(worker, signal.SIGKILL)
    assert_right(shmload.load_state_dict(shard, "bfloat16"))
    assert status().misses == 2


@pytest.mark.slow
def test_worker_killed_in_the_middle_is_replaced(at_work):
    process, client = at_work
    for worker in workers_of(process):
        os.kill(worker, signal.SIGKILL)
    client.expect("SUM")
    assert status().misses == 2
