"""A service or client that dies or stops harms no other process."""

import os
import select
import signal
import sys

import pytest
from children import run_to_end
from serving import SERVE, status, stopped, wait_until
from weight import VALUES, assert_right

import shmload
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import Reserve, Reserved

_LOAD = """
import sys, shmload
state = shmload.load_state_dict(sys.argv[1], "bfloat16", keep=True)
print("SUM", float(state["weight"].double().sum()), flush=True)
sys.stdin.readline()
"""


# The service dies ---------------------------------------------------------------------------------


def test_killed_service_costs_its_clients_nothing(service, shard):
    process = service()
    state = shmload.load_state_dict(shard, "bfloat16", keep=True)
    process.process.kill()
    process.wait()
    assert_right(state)
    assert shmload.segments()[0].is_leased
    service()
    assert shmload.warm(shard, torch_dtype="bfloat16").read_nbytes == 0
    assert (status().hits, status().misses) == (1, 0)


def test_service_that_stands_still_is_given_up(service, shard, configure):
    process = service()
    configure(service_timeout_s=0.5)
    with stopped(process.pid):
        assert_right(shmload.load_state_dict(shard, "bfloat16"))
    configure(service_timeout_s=10)
    assert status().misses == 0


@pytest.mark.parametrize("use", ["auto", "require"])
def test_service_that_is_killed_while_a_load_waits_for_room(service, shard, child, configure, use):
    configure(service=use)
    process = service("--budget", "64MiB")
    with Client(socket_path()) as other:
        other.ask(Reserve(64 << 20, 0), Reserved)
        client = child(_LOAD, shard)
        wait_until(lambda found: found.waiting_for_room == 1)
        process.process.kill()
        if use == "auto":
            assert float(client.expect("SUM")) == float(VALUES.bfloat16().double().sum())
        else:
            assert client.wait() == 1
            assert "ServiceUnavailable" in client.errors


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
        "state = shmload.load_state_dict(sys.argv[1], 'bfloat16', keep=True)\n"
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
