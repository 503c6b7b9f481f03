"""Containers of one node share segments and a budget, and see no process of each other."""

import subprocess

import pytest
from serving import SERVE
from warming import NBYTES

import shmload

_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

# Warms its source, holds it, and prints what it sees of the others.
_CLIENT = """
import os, sys
import shmload
from shmload._service.notice import end_service, require_service
budget = require_service().budget_nbytes
try:
    end_service()
except shmload.ServiceError as exc:
    assert "in another container" in str(exc)
report = shmload.warm(sys.argv[1], dtype="bfloat16")
state = shmload.load_state_dict(sys.argv[1], "bfloat16")
print("READ", report.read_nbytes, os.getpid(), budget, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def container(new_child):
    """Start Python as a container's first process, in new namespaces."""
    if subprocess.run([*_APART, "true"], capture_output=True, timeout=60).returncode != 0:
        pytest.skip("this system does not let one make namespaces")

    def start(code, *arguments):
        return new_child(code, *arguments, prefix=_APART)

    return start


@pytest.mark.slow
def test_containers_share_one_copy_within_the_budget_of_one_service(container, checkpoint, evicts):
    container(SERVE, "--budget", "1MiB").expect("READY=1")
    clients = [container(_CLIENT, checkpoint) for _ in range(2)]
    seen = [client.expect("READ").split() for client in clients]
    assert sorted(int(nbytes) for nbytes, _, _ in seen) == [0, NBYTES]
    assert {tuple(rest) for _, *rest in seen} == {("1", str(1 << 20))}
    with pytest.raises(shmload.SegmentBusy, match="by process"):
        shmload.evict(checkpoint)  # this process sees all holders
