"""The modules that programs import besides, and those of them that no template can import.

Both lists are of one interpreter with its path of packages. A module that has made a template unfit
stays out until its file changes.
"""

import contextlib
import functools
import importlib.util
import os
import sys

from shmload._templates import kind, place

_MAX_MODULES = 5000


def remember(names: list[str]) -> None:
    """Note modules that programs import, for the templates that start later."""
    known = _lines("modules")
    new = [name for name in names if name not in set(known)]
    if new and len(known) + len(new) <= _MAX_MODULES:
        _append("modules", new)


def remembered() -> list[str]:
    """Return the modules that programs have imported, in the order of their first import.

    Those that were unfit, and have not changed since, are not among them.
    """
    unfit = {(name, version) for name, version, _ in _unfit()}
    return [
        name for name in _lines("modules") if not unfit or (name, version_of(name)) not in unfit
    ]


def write_unfit(name: str, reason: str) -> None:
    """Note that no template can import a module, as it is now."""
    _append("unfit", ["\t".join((name, version_of(name), " ".join(reason.split())))])


def unfit() -> list[tuple[str, str]]:
    """Return the modules that no template can import now, each with the reason."""
    return [(name, reason) for name, version, reason in _unfit() if version == version_of(name)]


def version_of(name: str) -> str:
    """Return what changes when a module's package is installed anew, or edited."""
    with contextlib.suppress(Exception):  # finders of other packages may raise anything
        spec = importlib.util.find_spec(name.partition(".")[0])
        if spec and spec.origin:
            return f"{spec.origin} {os.stat(spec.origin).st_mtime_ns}"
    return "absent"


def _unfit() -> list[tuple[str, str, str]]:
    found = [line.split("\t") for line in _lines("unfit")]
    return [(fields[0], fields[1], fields[2]) for fields in found if len(fields) == 3]


@functools.cache
def choose_lists() -> str:
    """Return the key of this interpreter's lists, as it is when this is first called.

    A template calls this when it starts; its programs may change their path afterwards.
    """
    entries = sys.path if sys.flags.safe_path else sys.path[1:]
    return kind.key_of(repr((sys.executable, sys.prefix, sys.version, entries)))


def _path(name: str) -> str:
    return f"{place.folder()}/{name}-{choose_lists()}"


def _lines(name: str) -> list[str]:
    try:
        with open(_path(name), encoding="utf-8") as file:
            return [line for line in file.read().split("\n") if line]
    except (OSError, ValueError, place.PlaceUnsafe):
        return []


def _append(name: str, lines: list[str]) -> None:
    with (
        contextlib.suppress(OSError, place.PlaceUnsafe),
        open(_path(name), "a", encoding="utf-8") as file,
    ):
        file.write("".join(f"{line}\n" for line in lines))
