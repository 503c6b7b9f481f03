"""Ranks of a job on one host, forked from a process that has imported everything they need.

For each rank of each test a fork takes 0.1 s, and the imports would take 3 s.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

# Far longer than any job takes.
_JOB_TIMEOUT_S = 60.0
_MARK = b"RESULT "


class Ranks:
    """A process that forks ranks on demand, and ends with this object."""

    def __init__(self, module):
        """Import a module of jobs: functions that ranks run."""
        code = "import sys; sys.path[:0] = sys.argv[2:]; import ranks; ranks.fork_ranks()"
        # Modules of jobs lie beside this one and see the same packages.
        paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, module, *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._received = b""
        self._read_line()  # it is ready: no test is blamed for its imports

    def run(self, job, world_size, folder, **kwargs):
        """Run a job in `world_size` ranks and return each rank's result.

        The result of a killed rank is the signal's number.
        """
        ask = {"job": job, "world_size": world_size, "folder": str(folder), "kwargs": kwargs}
        self._process.stdin.write(json.dumps(ask).encode() + b"\n")
        results = json.loads(self._read_line())
        failed = [f"rank {r}: {what['raised']}" for r, what in enumerate(results) if what["raised"]]
        assert not failed, "\n".join(failed)
        return [what["returned"] for what in results]

    def end(self):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _read_line(self):
        deadline = time.monotonic() + 2 * _JOB_TIMEOUT_S
        while True:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                if line.startswith(_MARK):
                    return line[len(_MARK) :]
            left = deadline - time.monotonic()
            assert select.select([self._process.stdout], [], [], left)[0], "no answer"
            got = os.read(self._process.stdout.fileno(), 1 << 16)
            assert got, "the process that forks has ended"
            self._received += got


def fork_ranks():
    """Run the jobs requested on stdin, one per line."""
    jobs = importlib.import_module(sys.argv[1])
    print(_MARK.decode(), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        started = [
            _fork(getattr(jobs, ask["job"]), rank, ask["world_size"], ask["folder"], ask["kwargs"])
            for rank in range(ask["world_size"])
        ]
        deadline = time.monotonic() + _JOB_TIMEOUT_S
        results = [_result(pid, end, deadline) for pid, end in started]
        print(_MARK.decode() + json.dumps(results), flush=True)


def _fork(job, rank, world_size, folder, kwargs):
    end, other = os.pipe()
    pid = os.fork()
    if pid:
        os.close(other)
        return pid, end
    try:
        returned, raised = job(Rank(rank, world_size, Path(folder)), **kwargs), None
    except BaseException:
        returned, raised = None, traceback.format_exc()
    with contextlib.suppress(BaseException), os.fdopen(other, "w") as pipe:
        json.dump({"returned": returned, "raised": raised}, pipe)
    os._exit(0)


def _result(pid, end, deadline):
    received = b""
    while select.select([end], [], [], max(0, deadline - time.monotonic()))[0]:
        got = os.read(end, 1 << 16)
        if not got:
            break
        received += got
    else:
        os.kill(pid, signal.SIGKILL)
        received = json.dumps({"returned": None, "raised": "it hung"}).encode()
    os.close(end)
    _, status = os.waitpid(pid, 0)
    if received:
        return json.loads(received)
    return {"returned": os.WTERMSIG(status), "raised": None}


class Rank:
    """One rank of a job, in its process."""

    def __init__(self, rank, world_size, folder):
        self.rank = rank
        self.world_size = world_size
        self.folder = folder

    @contextlib.contextmanager
    def process_group(self):
        """Join the other ranks by gloo, over files and the loopback device."""
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", store=self.store("group"), rank=self.rank, world_size=self.world_size
        )
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()

    def store(self, name):
        """Return a key-value store that all ranks share."""
        import torch.distributed as dist

        return dist.FileStore(str(self.folder / name), self.world_size)
