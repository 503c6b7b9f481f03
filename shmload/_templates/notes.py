"""Which pipelines programs have loaded: the notes of a template, which the next one finds.

Only the template writes them, so no program's note is lost by another's. A pipeline is here the
text of its request, see `prepared.Request`; a program's pipelines are a tuple of these.
"""

import contextlib
import json
import os
import time
import zlib

from shmload._templates import place

_MAX_PROGRAMS = 64
_NOTE = "pipelines"
_WARMED = "warmed"
_MAX_WARMED = 4

Requests = tuple[str, ...]


class Notes:
    """The pipelines of programs, in the order of their last use.

    Args:
        key: of the template.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._of_programs: dict[str, Requests] = {}
        self._modules: dict[str, list[str]] = {}
        with contextlib.suppress(ValueError, TypeError):
            programs, self._modules = json.loads(place.read_note(key, _NOTE) or "")
            self._of_programs = {str(name): tuple(requests) for name, requests in programs}

    def of(self, program: str) -> Requests:
        """Return what a program has loaded when it last ran; nothing if that is not known."""
        return self._of_programs.get(program, ())

    def all(self) -> list[Requests]:
        """Return what was loaded together, last used first, and what `shmload warm` has read."""
        found = [*reversed(self._of_programs.values()), *((each,) for each in warmed())]
        return list(dict.fromkeys(found))

    def modules_of(self, request: str) -> list[str]:
        """Return what the load of a pipeline has imported in a program."""
        return self._modules.get(request, [])

    def add(self, program: str, requests: Requests, modules: list[str]) -> Requests:
        """Note what a program has loaded so far; return what it is expected to load in all.

        Args:
            program: its name.
            requests: the pipelines.
            modules: what it has imported for the last one; none if that was loaded ahead.
        """
        before = self._of_programs.pop(program, ())
        # If it has loaded more the last time, the rest may come yet.
        found = before if before[: len(requests)] == requests else requests
        self._of_programs[program] = found
        while len(self._of_programs) > _MAX_PROGRAMS:
            del self._of_programs[next(iter(self._of_programs))]
        known = {each for loaded in self._of_programs.values() for each in loaded}
        self._modules = {each: held for each, held in self._modules.items() if each in known}
        if modules:
            self._modules.setdefault(requests[-1], modules)
        if modules or found != before:
            text = json.dumps([list(self._of_programs.items()), self._modules])
            with contextlib.suppress(OSError, place.PlaceUnsafe):
                place.write_note(self._key, _NOTE, text)
        return found


def warmed() -> list[str]:
    """Return the requests of the pipelines that `shmload warm` has read last, the last first."""
    return [request for _, request, _ in _warmed()]


def note_warmed(request: str) -> None:
    """Note a pipeline for all templates of this user, those that run and those that will."""
    with contextlib.suppress(OSError, place.PlaceUnsafe):
        # Each in a file of its own: several may warm at once.
        key = f"{zlib.crc32(request.encode()):08x}"
        place.write_note(key, _WARMED, json.dumps([time.time_ns(), request]))
        for _, _, key in _warmed()[_MAX_WARMED:]:
            place.remove_note(key, _WARMED)


def _warmed() -> list[tuple[int, str, str]]:
    """Return what `shmload warm` has noted, the last first: when, the request, the note's key."""
    found = []
    with contextlib.suppress(OSError, place.PlaceUnsafe):
        for entry in os.scandir(place.folder()):
            if entry.name.endswith(f".{_WARMED}"):
                key = entry.name.partition(".")[0]
                with contextlib.suppress(ValueError, TypeError):
                    noted_ns, request = json.loads(place.read_note(key, _WARMED) or "")
                    found.append((int(noted_ns), str(request), key))
    return sorted(found, reverse=True)
