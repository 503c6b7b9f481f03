"""The variables of a program: what it starts with, what imports read of that, what it sets.

What libraries read on import is read in the template. A program that sets such a variable before
its imports starts over in the ordinary way once, and from then on uses a template that has these
variables.

`shmload run --redirect` has `redirect` on in a program before its first line. An ordinary Python is
told by two variables, which the processes that the program starts inherit; in a copy of a template
it is turned on by hand.
"""

import os

from shmload._host.variables import READ_LATER, is_of_import
from shmload._templates import place, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from shmload._templates.messages import Program

_READ = ("imports", "variables")
"""A note of all templates: the names of other variables that imports have read."""
_SET = "settings"
"""A note of a program."""
REDIRECT = "SHMLOAD_REDIRECT"
_PATH = "PYTHONPATH"
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def first_environment() -> dict[str, str]:
    """Return the variables with which this process was started; Python itself changes some."""
    with open("/proc/self/environ", "rb", buffering=0) as file:
        return variables_in(file.read())


def variables_in(raw: bytes) -> dict[str, str]:
    """Return the variables in the content of /proc/PID/environ.

    Those of `--redirect` are left out: `Program.redirect` says so.
    """
    pairs = [entry.partition(b"=") for entry in raw.split(b"\0") if entry]
    found = {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return without_redirect(found)


# That imports read ------------------------------------------------------------------------------


def read_on_import(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables among these that imports may read, or have read in a template."""
    noted = _noted_variables() - READ_LATER
    return {n: value for n, value in environment.items() if is_of_import(n) or n in noted}


def note_variables(names: "Iterable[str]") -> None:
    """Note variables that imports have read, for programs that start from now on."""
    noted = _noted_variables()
    found = noted | {name for name in names if not is_of_import(name)}
    if found != noted:
        place.write_note(*_READ, "\n".join(sorted(found)))


def _noted_variables() -> set[str]:
    return {*(place.read_note(*_READ) or "").splitlines()}


class ReadVariables:
    """The variables that a template's imports have read, as a program has them.

    Args:
        read: names, with what was found.
    """

    def __init__(self, read: "Mapping[str, str | None]") -> None:
        self._read = read
        self._begun: dict[str, str] = {}
        """As the program has got them."""
        self._last: dict[str, str] = {}
        """As the template has read them; later, as they were when they were last compared."""
        self._environ: dict[bytes, bytes] = {}
        """All variables, when these were last compared."""

    def difference_to(self, environment: "Mapping[str, str]") -> str | None:
        """Return a variable that imports have read with another value, or None."""
        for name, value in self._read.items():
            if name not in READ_LATER and environment.get(name) != value:
                return name
        return None

    def begin(self, settings: list[list[str]]) -> None:
        """Compare from now on with what the program begins with.

        Args:
            settings: the variables that it is going to set, as the template has them.
        """
        self._begun = self._now()
        self._last = with_settings(self._begun, settings)
        self._environ = {} if settings else _environ().copy()

    def change(self) -> tuple[str, list[list[str]]] | None:
        """Return what the program has done to them since the last call, and all that it has set."""
        if _environ() == self._environ:
            return None
        self._environ = _environ().copy()
        before, self._last = self._last, self._now()
        changed = differences(before, self._last)
        if not changed:
            return None
        name = changed[0][0]
        sets = "set" if self._last.get(name) != self._begun.get(name) else "did not set"
        reason = f"the program {sets} {name} before it imported a library"
        return reason, differences(self._begun, self._last)

    def note_import(self, names: "Collection[str]") -> None:
        """Take variables as an import has just set them, for what the program has begun with."""
        self._last = self._now()
        self._begun |= {n: value for n, value in self._last.items() if n in names}

    def _now(self) -> dict[str, str]:
        names = {*self._read, *self._last, *filter(is_of_import, os.environ)} - READ_LATER
        found = {name: os.environ.get(name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


def _environ() -> dict[bytes, bytes]:
    """Return the variables as they are kept: quick to compare, and not seen as reads."""
    return os.environ._data  # type: ignore[attr-defined,no-any-return]


# That programs set ------------------------------------------------------------------------------


def read_settings(program: "Program") -> list[list[str]]:
    """Return what a program has set last time: names with their values, or alone if removed."""
    found = place.read_note(_key(program), _SET)
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
        place.write_note(_key(program), _SET, wire.pack(settings).decode("latin-1"))
    else:
        place.remove_note(_key(program), _SET)


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
