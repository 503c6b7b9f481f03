"""What templates do with care: try things in a copy of this process, and catch what is written.

The copy may crash, hang, or be spoilt by it.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

_TIMEOUT_S = 600
_PR_SET_PDEATHSIG = 1
_THREADS_TIMEOUT_S = 2.0


class Unfit(Exception):
    """A process cannot be a template, or something cannot be done in one; str says why."""


def in_copy(function: Callable[[], str]) -> str:
    """Call a function in a copy of this process, which then ends; return what it returns.

    Nothing that the copy writes to the standard streams is seen.

    Raises:
        Unfit: it has raised, crashed, or not returned within ten minutes.
        OSError: no process can be started.
    """
    answer, said = (os.memfd_create(name, os.MFD_CLOEXEC) for name in ("answer", "said"))
    try:
        pid = os.fork()
        if pid == 0:
            _answer(function, answer, said)
        _, status = os.waitpid(pid, 0)
        text = os.pread(answer, os.fstat(answer).st_size, 0).decode("utf-8", "replace")
        if status == 0:
            return text
        words = os.pread(said, os.fstat(said).st_size, 0).decode("utf-8", "replace")
        last = "".join(f": {line}" for line in words.strip().splitlines()[-1:])
        raise Unfit(text or f"it ends the process{last}")
    finally:
        os.close(answer)
        os.close(said)


def _answer(function: Callable[[], str], answer: int, said: int) -> None:
    """Be the copy; do not return."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_TIMEOUT_S)
        for fd in (1, 2):
            os.dup2(said, fd)
        text, code = function(), 0
    except BaseException as exc:  # what is tried may raise anything
        text = str(exc) if isinstance(exc, Unfit) else f"{type(exc).__name__}: {exc}"
    finally:
        with contextlib.suppress(Exception):
            os.pwrite(answer, text.encode("utf-8", "replace"), 0)
        os._exit(code)


def require_fitness(who: str) -> None:
    """Check that copies of this process are sound.

    Args:
        who: what has been done here, for the error.

    Raises:
        Unfit: it has more than one thread, or has touched a GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Unfit(f"{who} has touched the GPU")
    if len(os.listdir("/proc/self/task")) == 1:
        return
    pid = os.fork()  # OpenBLAS ends its threads before a fork, and starts them when it needs them
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            raise Unfit(f"{who} has left threads running")
        time.sleep(0.001)


class Output:
    """Catches what is written to the standard streams, by Python or by C, in a block.

    Args:
        files: by descriptor of a stream: the file that takes what is written; owned by this.
    """

    def __init__(self, files: Mapping[int, int]) -> None:
        self._files = files
        self._nbytes = dict.fromkeys(files, 0)

    def __enter__(self) -> Self:
        self._saved = {fd: os.dup(fd) for fd in self._files}
        for fd, file in self._files.items():
            os.dup2(file, fd)
        return self

    def drain(self) -> list[tuple[int, bytes]]:
        """Return what came since the last call: descriptors and bytes."""
        found = []
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            if stream:
                stream.flush()
            written = os.fstat(self._files[fd]).st_size - self._nbytes[fd]
            if written > 0:
                found.append((fd, os.pread(self._files[fd], written, self._nbytes[fd])))
                self._nbytes[fd] += written
        return found

    def __exit__(self, *_: object) -> None:
        self.drain()
        for fd, own in self._saved.items():
            os.dup2(own, fd)
            os.close(own)
            os.close(self._files[fd])
