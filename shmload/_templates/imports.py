"""The imports of a template: what they are, what they write, and whether it is fit afterwards."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Self

from shmload._templates import modules, place
from shmload._templates.recorder import Recorder

# A module that is not imported by then never will be; its process is ended by SIGALRM.
_IMPORT_TIMEOUT_S = 600
_THREADS_TIMEOUT_S = 2.0


class Unfit(Exception):
    """A process cannot be a template; str says why."""


class UnfitModule(Unfit):
    """A module that only some programs need makes it so. It is noted, and left out next time."""


class Imports:
    """Imports modules, with a record of what that does.

    Args:
        key: of the template, for the notes that tell of a crash.
        recorder: makes the record.
    """

    def __init__(self, key: str, recorder: Recorder) -> None:
        self._key = key
        self._recorder = recorder
        self.remembered: list[str] = []
        """The modules that programs import besides, as noted when this began."""
        self.descriptors: set[int] = set()
        """What the modules have opened."""

    def make(self, wanted: Sequence[str]) -> None:
        """Import modules, and then those that programs import besides.

        Raises:
            Unfit: this process cannot be a template any more.
            BaseException: a module has raised it.
        """
        self._blame_for_crash(wanted)
        self.remembered = modules.remembered()
        signal.alarm(_IMPORT_TIMEOUT_S)
        with _Output(self._key) as output:
            self._recorder.drain = output.drain
            before = _descriptors()
            for name in wanted:
                place.write_note(self._key, "importing", name)
                importlib.import_module(name)
            require_fitness(wanted)
            for name in self.remembered:
                self._import_besides(name)
            self._recorder.stop()
            self.descriptors = _descriptors() - before
        signal.alarm(0)
        place.remove_note(self._key, "importing")

    def _import_besides(self, name: str) -> None:
        place.write_note(self._key, "importing", name)
        try:
            importlib.import_module(name)
            require_fitness([name])
        except ImportError:
            return  # it may have been removed since
        except BaseException as exc:  # a module may raise anything
            known = isinstance(exc, Unfit)
            modules.write_unfit(name, str(exc) if known else f"{type(exc).__name__}: {exc}")
            place.remove_note(self._key, "importing")
            raise UnfitModule(name) from exc

    def _blame_for_crash(self, wanted: Sequence[str]) -> None:
        """Leave out a module in whose import the last template of this key has ended."""
        name = place.read_note(self._key, "importing")
        if name and name not in wanted:
            modules.write_unfit(name, how_it_crashed(self._key) or "")
        place.remove_note(self._key, "importing")


def how_it_crashed(key: str) -> str | None:
    """Return what is known of a template that has ended while it imported; None if it has not."""
    name = place.read_note(key, "importing")
    if not name:
        return None
    said = (place.read_note(key, "stderr") or "").strip().splitlines()
    return f"it ended while it imported {name}" + (f": {said[-1]}" if said else "")


def require_fitness(names: Sequence[str]) -> None:
    """Check that copies of this process are sound.

    Args:
        names: the modules that were imported last, for the error.

    Raises:
        Unfit: it has more than one thread, or has touched a GPU.
    """
    who = f"the import of {', '.join(names)}"
    if len(os.listdir("/proc/self/task")) > 1:
        _end_idle_threads(who)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        raise Unfit(f"{who} has touched the GPU")


def _end_idle_threads(who: str) -> None:
    pid = os.fork()  # OpenBLAS ends its threads before a fork, and starts them when it needs them
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            raise Unfit(f"{who} has left threads running")
        time.sleep(0.001)


class _Output:
    """Catches what is written to the standard streams, by Python or by C, in a block.

    Files take it, so that the last words of a process that crashes can be read.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def __enter__(self) -> Self:
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._sizes = dict.fromkeys((1, 2), 0)
        for fd, name in ((1, "stdout"), (2, "stderr")):
            place.write_note(self._key, name, "")
            file = os.open(f"{place.socket_of(self._key)}.{name}", os.O_RDWR | os.O_APPEND)
            os.dup2(file, fd)
            os.close(file)
        return self

    def drain(self) -> list[tuple[int, bytes]]:
        """Return what came since the last call."""
        found = []
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            size = os.fstat(fd).st_size
            if size > self._sizes[fd]:
                found.append((fd, os.pread(fd, size - self._sizes[fd], self._sizes[fd])))
                self._sizes[fd] = size
        return found

    def __exit__(self, *_: object) -> None:
        for fd, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(self._saved[fd], fd)
            os.close(self._saved[fd])
            if _[0] is None:
                place.remove_note(self._key, name)


def _descriptors() -> set[int]:
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }
