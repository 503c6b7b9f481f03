"""The variables that a program sets before its imports, noted for its next run.

What libraries read on import is read in the template, before the program sets it. So such a program
starts over in the ordinary way once, and from then on uses a template that has these variables.
"""

import os

from shmload._templates import kind, place, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from shmload._templates.messages import Program

_NOTE = "settings"


def read_settings(program: "Program") -> list[list[str]]:
    """Return what a program has set last time: names with their values, or alone if removed."""
    found = place.read_note(_key(program), _NOTE)
    try:
        found_: list[list[str]] = wire.unpack((found or "").encode("latin-1"), list[list[str]])
        return found_
    except ValueError:  # half written
        return []


def write_settings(program: "Program", settings: list[list[str]]) -> None:
    """Note what a program has set.

    Raises:
        OSError: it cannot be written.
        PlaceUnsafe: see `place`.
    """
    if settings:
        place.write_note(_key(program), _NOTE, wire.pack(settings).decode("latin-1"))
    else:
        place.remove_note(_key(program), _NOTE)


def with_settings(variables: "Mapping[str, str]", settings: list[list[str]]) -> dict[str, str]:
    """Return variables as they are once a program has set its own."""
    found = dict(variables)
    for name, *value in settings:
        found.pop(name, None)
        if value:
            found[name] = value[0]
    return found


def differences(before: "Mapping[str, str]", after: "Mapping[str, str]") -> list[list[str]]:
    """Return what leads from some variables to others."""
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    return [[name, after[name]] if name in after else [name] for name in changed]


def name_of(program: "Program") -> str:
    """Return what all runs of a program in this directory have in common."""
    value = os.fsdecode(program.value)
    if program.kind == "script":
        value = os.path.abspath(value)
    return f"{os.getcwd()}\n{program.kind}\n{value}"


def _key(program: "Program") -> str:
    return kind.key_of(name_of(program))
