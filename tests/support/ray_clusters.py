"""A Ray cluster for a test; its driver is a child process, because Ray leaves threads behind."""

import base64
import os
import pickle
import selectors
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_SUPPORT = Path(__file__).parent
# Far longer than any step takes beside other tests: actors import torch in their own processes.
_DEADLINE_S = 240.0
# In a pid namespace, where allowed, the kernel ends all of Ray's processes with the driver: some do
# not end by themselves, and they have process groups of their own.
_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class RayCluster:
    """A cluster and its driver, which evaluates expressions; leaving the context ends both."""

    def __init__(self, log):
        self._log = log
        self.is_late = False  # whether a question has no answer yet
        # A short path: Ray's sockets lie there, and a socket's path has at most 107 bytes.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        environment = os.environ | {
            "PYTHONPATH": f"{_SUPPORT.parents[1]}{os.pathsep}{_SUPPORT}",
            "RAY_TMPDIR": self._folder,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Else actors would wait while other tests use all cores.
            "RAY_worker_niceness": "0",
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [*_apart(), sys.executable, "-W", "ignore", str(_SUPPORT / "ray_driver.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                bufsize=0,
            )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.stdin.close()
        try:
            self._process.wait(_DEADLINE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            shutil.rmtree(self._folder)

    def ask(self, expression):
        """Return the value of an expression evaluated in the driver."""
        assert not self.is_late, "an earlier question has no answer yet"
        self.is_late = True
        self._process.stdin.write(f"{expression}\n".encode())
        answer = base64.b64decode(self._read_line())
        self.is_late = False
        path = [*sys.path]
        try:
            value, error = pickle.loads(answer)
        finally:
            # Unpickling a report imports Ray, which puts its own packages on the path. Skeletons
            # depend on the path: with Ray's packages on it this process's would not fit its
            # children.
            sys.path[:] = path
        assert error is None, f"{error}; {self._said()}"
        return value

    def _read_line(self):
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                assert selector.select(_DEADLINE_S), f"no answer; {self._said()}"
                got = os.read(self._process.stdout.fileno(), 1 << 16)
                assert got, f"the driver ended; {self._said()}"
                received += got
        return received

    def _said(self):
        """Return what the driver, the actors and Ray's own processes said last."""
        logs = [*Path(self._folder).glob("**/session_latest/logs/*")]
        names = ("worker-*.err", "raylet*.out", "gcs_server.out")
        wanted = [self._log, *(path for name in names for path in logs if path.match(name))]
        texts = ((path.name, path.read_text(errors="replace")[-2000:]) for path in wanted)
        return "\n".join(f"--- {name}\n{text}" for name, text in texts if text)


def _apart():
    try:
        done = subprocess.run([*_APART, "true"], capture_output=True, timeout=_DEADLINE_S)
    except FileNotFoundError:
        return ()
    return _APART if done.returncode == 0 else ()


def weights(model):
    """Return all bytes of a model's weights."""
    tensors = model.state_dict().values()
    return b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)
