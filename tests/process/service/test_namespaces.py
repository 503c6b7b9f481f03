"""Containers of one node share segments and the service without seeing each other's processes."""

import subprocess

import pytest
from serving import SERVE, status
from warming import NBYTES

import shmload

_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

# Warms its source, holds it, and prints what it sees of the others.
_CLIENT = """
import os, sys
import shmload
from shmload._service.endpoint import connect, service_pid, socket_path
report = shmload.warm(sys.argv[1], torch_dtype="bfloat16")
state = shmload.load_state_dict(sys.argv[1], "bfloat16")
with connect(socket_path(), 10) as service:
    print("READ", report.read_nbytes, os.getpid(), service_pid(service, socket_path()), flush=True)
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
def test_containers_share_what_one_service_decodes(container, configure, tmp_path, checkpoint):
    socket = tmp_path / "run" / "service.sock"
    configure(service="require", socket=socket, inline_nbytes=0, workers=1)
    container(SERVE, "--budget", "1MiB").expect("READY=1")
    read = []
    for _ in range(2):
        nbytes, pid, pid_of_service = container(_CLIENT, checkpoint).expect("READ").split()
        read.append(int(nbytes))
        assert (pid, pid_of_service) == ("1", "None")
    assert read == [NBYTES, 0]
    (lease,) = status().leases
    assert lease.pids == ()
    with pytest.raises(shmload.SegmentBusy, match="by process"):
        shmload.evict(checkpoint)  # this process sees all holders
