"""The pipelines that programs load: noted, and loaded ahead by the copies of a template.

A note names a program and what it has loaded. If the program's next run loads the same, spares load
it from then on, and wait. If another program comes instead, what was loaded is dropped.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from shmload._templates import place
from shmload._templates.messages import Program
from shmload._templates.stash import Stash

_DOOR = "shmload.integrations._building.prepared"
_LOADS = "shmload.integrations._building.preparing"
_NOTE = "pipelines"
_SEEN = "pipelines-seen"
_UNFIT = "pipelines-unfit"
_MAX_PIPELINES = 4
PIPELINES = "pipelines"
"""The name of the step in `ahead`."""
# Programs inherit low numbers; what is opened ahead gets higher ones.
_FIRST_NUMBER = 128


class Pipelines:
    """The pipelines of a template's programs.

    Args:
        key: of the template.
        modules: those that it has imported, by name.
        stash: hides them from programs.
    """

    def __init__(self, key: str, modules: Mapping[str, Any], stash: Stash) -> None:
        self._door: Any = modules.get(_DOOR)
        """The module that gives programs what was loaded; None if it was not imported."""
        self._known = frozenset(modules)
        self._stash = stash
        self._key = key
        self._folder = place.folder()
        self._program = ""
        self._requests: list[Any] = []
        place.remove_note(key, _UNFIT)  # this one may do better
        self._seen: str | None = None
        """The note of the program before."""

    def work(self) -> int:
        """Return which pipelines a spare has to load, as a number that changes with them; or 0."""
        try:
            return os.stat(self._path(_NOTE)).st_mtime_ns
        except OSError:
            return 0

    def sources(self) -> list[str]:
        """Return what a spare that has done its work has loaded."""
        # Not by the door, whose imports are hidden here.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            _, requests = json.loads(place.read_note(self._key, _NOTE) or "")
            return [
                str(each["source"]) for each in requests if self._known.issuperset(each["modules"])
            ]
        return []

    def prepare(self) -> set[int]:
        """Load ahead what the last program has loaded; call this in a spare.

        Returns:
            The descriptors that have to stay open.
        """
        numbers: set[int] = set()
        for request in self._read_note():
            numbers |= self._prepare_one(request)
        return numbers

    def _read_note(self) -> list[Any]:
        """Return the calls that a program makes again and again, and that can be made here."""
        note = place.read_note(self._key, _NOTE)
        if self._door is None or note is None or _LOADS not in self._known:
            return []
        try:
            self._program, requests = self._door.decode_note(note)
        except ValueError:
            return []
        return [request for request in requests if self._known.issuperset(request.modules)]

    def _prepare_one(self, request: Any) -> set[int]:
        before = set(sys.modules)
        try:
            with _high_numbers(), _no_output() as output:
                load = sys.modules["shmload.integrations.diffusers"].load_pipeline
                numbers: set[int] = sys.modules[_LOADS].prepare(request, load)
            has_threads = len(os.listdir("/proc/self/task")) > 1
            # What the libraries say at a load, the program's user is to read.
            if not (output.said or has_threads) and before.issuperset(sys.modules):
                return numbers
        except Exception:  # whatever it is, the program loads it itself
            pass
        with contextlib.suppress(OSError):
            os.replace(self._path(_NOTE), self._path(_UNFIT))
        os._exit(0)  # the next spare is one without traces of this

    def begin(self, program: Program) -> None:
        """Have a program take what is prepared for it; drop what is another's.

        Args:
            program: as it was called, in its directory.
        """
        if self._door is None:
            return
        name = name_of(program)
        if not program.prepares or name != self._program:
            self._door.drop()
        if program.prepares:
            self._program = name
            self._door.on_load = self._note
            self._door.hidden = self._stash

    def _note(self, request: Any) -> None:
        """Note what a program has loaded, if that is a request; this runs in the program."""
        if request is None:
            return
        if not self._requests:
            self._seen = place.read_note(self._key, _SEEN)
        self._requests = [*self._requests, request][:_MAX_PIPELINES]
        try:
            text = self._door.encode_note(self._program, self._requests)
        except UnicodeEncodeError:  # the name of a file or directory is not UTF-8
            return
        self._write(_SEEN, text)
        known = (place.read_note(self._key, name) for name in (_NOTE, _UNFIT))
        if self._door.is_part_of(text, self._seen) and text not in known:
            self._write(_NOTE, text)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{self._key}.{name}"

    def _write(self, name: str, text: str) -> None:
        path = self._path(name)
        with contextlib.suppress(OSError):
            new = f"{path}.{os.getpid()}"
            with open(new, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(new, path)


def name_of(program: Program) -> str:
    """Return what two runs of the same program have in common."""
    value = os.fsdecode(program.value)
    if program.kind == "script":
        value = os.path.abspath(value)
    return f"{os.getcwd()}\n{program.kind}\n{value}"


@contextlib.contextmanager
def _high_numbers() -> Iterator[None]:
    """Have what is opened in a block get descriptors from `_FIRST_NUMBER` on."""
    taken: list[int] = []
    try:
        while not taken or taken[-1] < _FIRST_NUMBER:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for number in taken:
            os.close(number)


class _Output:
    said = False


@contextlib.contextmanager
def _no_output() -> Iterator[_Output]:
    """Catch what is written to the standard streams in a block; the libraries show no bars."""
    output = _Output()
    saved = [os.dup(1), os.dup(2)]
    file = os.memfd_create("shmload-said", os.MFD_CLOEXEC)
    bars = [
        module
        for name in ("diffusers.utils.logging", "transformers.utils.logging")
        if (module := sys.modules.get(name)) and hasattr(module, "_tqdm_active")
    ]
    were_active = [vars(module)["_tqdm_active"] for module in bars]
    for module in bars:
        vars(module)["_tqdm_active"] = False
    try:
        for number in (1, 2):
            os.dup2(file, number)
        yield output
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream:
                stream.flush()
        for module, was_active in zip(bars, were_active, strict=True):
            vars(module)["_tqdm_active"] = was_active
        output.said = os.fstat(file).st_size > 0
        os.close(file)
        for number, own in zip((1, 2), saved, strict=True):
            os.dup2(own, number)
            os.close(own)
