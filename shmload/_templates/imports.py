"""The imports of a template: what they are, what they write, and whether it is fit afterwards.

The libraries are known to be neutral: a test says so. What the user names besides is tried in a
copy of the template first, and imported only if that leaves all else as it was.
"""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from shmload._templates import place
from shmload._templates.copies import Output, Unfit, in_copy, require_fitness
from shmload._templates.neutral import Snapshot
from shmload._templates.recorder import Recorder
from shmload._templates.start import MODULES

# A library that is not imported by then never will be; its process is ended by SIGALRM.
_IMPORT_TIMEOUT_S = 600
_MAX_SHOWN = 5
_TRUSTED = sys.stdlib_module_names | {name.partition(".")[0] for name in MODULES}


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
        signal.alarm(_IMPORT_TIMEOUT_S)
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


def how_it_crashed(key: str) -> str | None:
    """Return what is known of a template that has ended while it imported; None if it has not."""
    name = place.read_note(key, "importing")
    if not name:
        return None
    said = (place.read_note(key, "stderr") or "").strip().splitlines()
    return f"it ended while it imported {name}" + (f": {said[-1]}" if said else "")


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
            before = None if package in _TRUSTED else Snapshot()
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
    return sorted(found.items(), key=lambda each: (each[0] not in _TRUSTED, each[0] == last))


def _descriptors() -> set[int]:
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }
