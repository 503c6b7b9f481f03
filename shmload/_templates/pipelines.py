"""The pipelines that programs load: noted, and loaded ahead by the copies of a template.

A note names a program and what it has loaded. The next spare loads the same and waits. If another
program comes instead, what was loaded is dropped.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from shmload._templates import place
from shmload._templates.messages import Program

_DOOR = "shmload.integrations._building.prepared"
_LOADS = "shmload.integrations._building.preparing"
_NOTE = "pipelines"
_MAX_PIPELINES = 4
PIPELINES = "pipelines"
"""The name of the step in `ahead`."""
# Programs inherit low numbers; what is opened ahead gets higher ones.
_FIRST_NUMBER = 128


class Pipelines:
    """The pipelines of a template's programs.

    Args:
        key: of the template.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._folder = place.folder()
        self._program = ""
        self._requests: list[Any] = []

    def has_work(self) -> bool:
        """Tell whether a spare has something to load, which takes a while."""
        return os.path.exists(f"{self._folder}/{self._key}.{_NOTE}")

    def prepare(self) -> set[int]:
        """Load ahead what the last program has loaded; call this in a spare.

        Returns:
            The descriptors that have to stay open.
        """
        door = _door()
        note = place.read_note(self._key, _NOTE)
        if door is None or note is None or _LOADS not in sys.modules:
            return set()
        numbers: set[int] = set()
        with contextlib.suppress(ValueError):
            self._program, requests = door.decode_note(note)
            for request in requests:
                if all(name in sys.modules for name in request.modules):
                    numbers |= self._prepare_one(request)
        return numbers

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
        place.remove_note(self._key, _NOTE)
        os._exit(0)  # the next spare is one without traces of this

    def begin(self, program: Program) -> None:
        """Have a program take what is prepared for it; drop what is another's.

        Args:
            program: as it was called, in its directory.
        """
        door = _door()
        if door is None:
            return
        name = name_of(program)
        if not program.prepares or name != self._program:
            door.drop()
        if program.prepares:
            self._program = name
            door.on_load = self._note

    def _note(self, request: Any) -> None:
        """Note what a program has loaded; this runs in the program."""
        self._requests = [*self._requests, request][:_MAX_PIPELINES]
        text = _door().encode_note(self._program, self._requests)
        path = f"{self._folder}/{self._key}.{_NOTE}"
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


def _door() -> Any:
    """Return the module that loads ahead, also while it is hidden; None if it was not imported."""
    global _found
    _found = _found or sys.modules.get(_DOOR)
    return _found


_found: Any = None


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
