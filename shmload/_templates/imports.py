"""The imports of a template: the libraries, what the user names, and what loads have kept.

A recall makes objects of the libraries' classes, and imports their modules first. A new Python, or
a template that has imported the libraries alone, needs a second for Stable Diffusion's.
"""

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from shmload._templates import place
from shmload._templates.freshness import Freshness
from shmload._templates.hidden import Hidden
from shmload._templates.start import MODULES

LOOK_S = 5.0
"""How often a template looks whether loads have kept more."""
# An import that has not ended by then never will; SIGALRM ends the process.
_TIMEOUT_S = 600
_THREADS_TIMEOUT_S = 2.0
_STORED, _SHM = "shmload._building.stored", "shmload._host.shm"
# A module of another package is imported by the program that needs it.
_LIBRARIES = {name.partition(".")[0] for name in MODULES}


class Unfit(Exception):
    """This process cannot be a template; str says why."""


class Imports:
    """Imports modules, which are hidden afterwards.

    Args:
        key: of the template, for the note with what they write.
        hidden: hides them.
    """

    def __init__(self, key: str, hidden: Hidden) -> None:
        self._key = key
        self._hidden = hidden
        self.descriptors: set[int] = set()
        """What the modules have opened."""
        self.left_out: list[str] = []
        """The modules that were named and cannot be imported, each with the reason."""
        self._changed_ns = -1
        self._looked = 0.0

    def make(self, wanted: Sequence[str]) -> Freshness:
        """Import modules; return how the files of all are now.

        Raises:
            Unfit: this process cannot be a template any more.
            BaseException: a library has raised it.
        """
        signal.alarm(_TIMEOUT_S)
        before = _descriptors()
        with self._hidden.shown():
            path = f"{place.socket_of(self._key)}.said"  # a process that crashes leaves it
            said = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with _output_to(said):
                for name in wanted:
                    self._import(name)
            self._hidden.said += os.pread(said, os.fstat(said).st_size, 0)
            os.close(said)
            _require_fitness()
            freshness = Freshness()
        self.descriptors |= _descriptors() - before - freshness.descriptors
        place.remove_note(self._key, "said")
        signal.alarm(0)
        return freshness

    def _import(self, name: str) -> None:
        try:
            importlib.import_module(name)
        except Exception as exc:  # a module may raise anything
            if name in MODULES:
                raise
            self.left_out.append(f"{name}: {type(exc).__name__}: {exc}")

    def kept(self) -> list[str]:
        """Return the modules of what loads have kept that are not imported yet.

        It looks at most every `LOOK_S`, and only if something was made or removed since.
        """
        stored: Any = self._hidden.modules.get(_STORED)
        now = time.monotonic()
        if stored is None or now - self._looked < LOOK_S:
            return []
        self._looked = now
        shm: Any = self._hidden.modules[_SHM]
        changed_ns = os.stat(shm.SHM_DIR).st_mtime_ns
        if changed_ns == self._changed_ns:
            return []
        self._changed_ns = changed_ns
        with self._hidden.shown(), contextlib.suppress(Exception):  # of another shmload, say
            found = stored.modules_kept()
            return sorted(
                n for n in found - sys.modules.keys() if n.partition(".")[0] in _LIBRARIES
            )
        return []


def _require_fitness() -> None:
    """Check that copies of this process are sound.

    Raises:
        Unfit: it has more than one thread, or has touched a GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Unfit("an import has touched the GPU")
    if len(os.listdir("/proc/self/task")) == 1:
        return
    pid = os.fork()  # OpenBLAS ends its threads before a fork, and starts them when it needs them
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            raise Unfit("an import has left threads running")
        time.sleep(0.001)


@contextlib.contextmanager
def _output_to(file: int) -> Any:
    """Have a file take what is written to the standard streams in a block."""
    saved = [os.dup(fd) for fd in (1, 2)]
    for fd in (1, 2):
        os.dup2(file, fd)
    try:
        yield
    finally:
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(saved[fd - 1], fd)
            os.close(saved[fd - 1])


def _descriptors() -> set[int]:
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }
