"""A process that dies gives its leases back, and no other process is harmed."""

import os
import select
import signal

import pytest

import shmload

_LOAD = """
import sys, shmload
state = shmload.load_state_dict(sys.argv[1], "bfloat16", keep=True)
print("SUM", float(state["a"].double().sum()), flush=True)
sys.stdin.readline()
"""


def test_killed_user_gives_its_lease_back(child, checkpoint):
    client = child(_LOAD, checkpoint)
    client.expect("SUM")
    assert [user.pid for model in shmload.models() for user in model.used_by] == [client.pid]
    client.process.kill()
    client.wait()
    assert len(shmload.evict(checkpoint)) == 1


def test_lease_goes_with_the_last_process_that_has_it(child, checkpoint):
    client = child(
        "import os, sys, shmload\n"
        "state = shmload.load_state_dict(sys.argv[1], 'bfloat16', keep=True)\n"
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
