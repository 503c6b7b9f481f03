"""The variables of a program: what it starts with, what imports read of that, what it sets.

What libraries read on import is read in the template. A program that sets such a variable before
its imports starts over in the ordinary way once, and from then on uses a template that has these
variables.

`shmload run --redirect` has `redirect` on in a program before its first line. An ordinary Python is
told by two variables, which the processes that the program starts inherit; in a copy of a template
it is turned on by hand.
"""

import os

from shmload._host.variables import is_of_import
from shmload._templates import place, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from shmload._templates.messages import Program

_SET = "settings"
"""A note of a program."""
REDIRECT = "SHMLOAD_REDIRECT"
_PATH = "PYTHONPATH"
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def first_environment() -> dict[str, str]:
    """Return the variables with which this process was started; Python itself changes some."""
    return variables_in(first_environ())


def first_environ() -> bytes:
    """Return the same, as /proc/PID/environ has them."""
    with open("/proc/self/environ", "rb", buffering=0) as file:
        return file.read()


def variables_in(raw: bytes) -> dict[str, str]:
    """Return the variables in the content of /proc/PID/environ.

    Those of `--redirect` are left out: `Program.redirect` says so.
    """
    pairs = [entry.partition(b"=") for entry in raw.split(b"\0") if entry]
    found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return without_redirect(found)


def read_on_import(environment: "Mapping[str, str]") -> dict[str, str]:
    """Return the variables among these that imports may read."""
    return {name: value for name, value in environment.items() if is_of_import(name)}


# That programs set ------------------------------------------------------------------------------


def read_settings(program: "Program") -> list[list[str]]:
    """Return what a program has set last time: names with their values, or alone if removed."""
    found = place.read_note(_key(program), _SET)
    try:
        settings: list[list[str]] = wire.unpack((found or "").encode("latin-1"), list[list[str]])
        return settings
    except ValueError:  # half written
        return []


def write_settings(program: "Program", settings: list[list[str]]) -> None:
    """Note what a program has set.

    Raises:
        OSError: it cannot be written.
        PlaceUnsafe: see `place`.
    """
    place.write_note(_key(program), _SET, wire.pack(settings).decode("latin-1"))


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


def _key(program: "Program") -> str:
    """Return the key of the note that all runs of a program in this directory share."""
    value = os.fsdecode(program.value)
    if program.kind == "script":
        value = os.path.abspath(value)
    return place.key_of(f"{os.getcwd()}\n{program.kind}\n{value}")


# Of --redirect ----------------------------------------------------------------------------------


def with_redirect(way: str, environment: "Mapping[str, str]") -> dict[str, str]:
    """Return an environment in which `redirect` is on.

    Args:
        way: `1`, or `verbose` to have each call's way written on standard error; empty for none.
        environment: as it is without.
    """
    found = dict(environment)
    if way:
        before = environment.get(_PATH)
        found |= {REDIRECT: way, _PATH: f"{_FOLDER}{os.pathsep}{before}" if before else _FOLDER}
    return found


def without_redirect(environment: "Mapping[str, str]") -> dict[str, str]:
    """Return an environment without what `with_redirect` has set in it."""
    found = {name: value for name, value in environment.items() if name != REDIRECT}
    entries = found.get(_PATH, "").split(os.pathsep)
    if _FOLDER in entries:
        del found[_PATH]
        if rest := [entry for entry in entries if entry != _FOLDER]:
            found[_PATH] = os.pathsep.join(rest)
    return found
