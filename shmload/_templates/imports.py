"""The imports of a template: what they are, what they write, and whether it is fit afterwards.

The libraries are known to be neutral: a test says so. What the user names besides is tried in a
copy of the template first, and imported only if that leaves all else as it was. The copy may crash,
hang, or be spoilt by it.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from shmload._templates import place
from shmload._templates.neutral import Snapshot
from shmload._templates.recorder import Recorder
from shmload._templates.start import MODULES

# An import or a copy that has not ended by then never will; SIGALRM ends the process.
TIMEOUT_S = 600
# A third of what a program gets.
_NICENESS = 5
_PR_SET_PDEATHSIG = 1
_THREADS_TIMEOUT_S = 2.0
_MAX_SHOWN = 5
TRUSTED = sys.stdlib_module_names | {name.partition(".")[0] for name in MODULES}


class Imports:
    """Imports modules, with a record of what that does.

    Args:
        key: of the template, for the notes that tell of a crash.
        recorder: makes the record.
    """

    def __init__(self, key: str, recorder: Recorder) -> None:
        self._key = key
        self.recorder = recorder
        self.descriptors: set[int] = set()
        """What the modules have opened."""
        self.left_out: list[str] = []
        """The modules that were named and are not imported, each with the reason."""

    def make(self, wanted: Sequence[str]) -> None:
        """Import modules; leave out what is not neutral, unless it is one of the libraries.

        Raises:
            Unfit: this process cannot be a template any more.
            BaseException: a library has raised it.
        """
        signal.alarm(TIMEOUT_S)
        with Output({1: self._file("stdout"), 2: self._file("stderr")}) as output:
            self.recorder.drain = output.drain
            before = _descriptors()
            for name in wanted:
                place.write_note(self._key, "importing", name)
                if name not in MODULES:
                    signal.alarm(0)
                    if reason := why_not_neutral(name, self.recorder):
                        self.left_out.append(f"{name}: {reason}")
                        continue
                importlib.import_module(name)
            require_fitness(f"the import of {', '.join(wanted)}")
            self.recorder.stop()
            self.descriptors = _descriptors() - before
        signal.alarm(0)
        for name in ("importing", "stdout", "stderr"):
            place.remove_note(self._key, name)

    def _file(self, name: str) -> int:
        """Open a note for what is written: the last words of a process that crashes can be read."""
        place.write_note(self._key, name, "")
        return os.open(f"{place.socket_of(self._key)}.{name}", os.O_RDWR | os.O_APPEND)


def why_not_neutral(name: str, recorder: Recorder) -> str:
    """Import a module in a copy of this process; return why it must not be imported here, or "".

    What it needs is imported before it, one package after the other: so each is compared with all
    that it could have changed, and blamed for nothing that another has done.
    """

    def learn() -> str:
        importlib.import_module(name)
        require_fitness(f"the import of {name}")
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            if children := file.read().split():
                for child in children:
                    os.kill(int(child), signal.SIGKILL)
                raise Unfit(f"the import of {name} has started a process")
        return "\n".join(recorder.ended[known:])

    def judge() -> str:
        for package, members in _by_package(ended):
            before = None if package in TRUSTED else Snapshot()
            for each in members:
                with contextlib.suppress(Exception):  # it needs the ones that come later
                    importlib.import_module(each)
            if before and (changes := before.changes()):
                who = "" if package == name.partition(".")[0] else f"{package}, which it needs, "
                more = len(changes) - _MAX_SHOWN
                shown = "; ".join(changes[:_MAX_SHOWN]) + (f"; {more} more" if more > 0 else "")
                return f"{who}changes what other programs see: {shown}"
        return ""

    known = len(recorder.ended)
    try:
        ended = in_copy(learn).split()
        return in_copy(judge) if ended else ""
    except Unfit as exc:
        return str(exc)


def _by_package(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return modules by package: first those that are trusted, and the last one's last."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.partition(".")[0], []).append(name)
    last = names[-1].partition(".")[0]
    return sorted(found.items(), key=lambda each: (each[0] not in TRUSTED, each[0] == last))


def _descriptors() -> set[int]:
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }


# In a copy ---------------------------------------------------------------------------------------


class Unfit(Exception):
    """A process cannot be a template, or something cannot be done in one; str says why."""


def in_copy(function: Callable[[], str]) -> str:
    """Call a function in a copy of this process, which then ends; return what it returns.

    Nothing that the copy writes to the standard streams is seen. It leaves the processor to others.

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
        signal.alarm(TIMEOUT_S)
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICENESS))
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
