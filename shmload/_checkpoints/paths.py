"""Paths as users type them: `~` is the home directory, and a mistyped path gets a hint."""

import os
from pathlib import Path

from shmload._wording import nearest_name
from shmload.errors import SourceNotFound

_Given = str | os.PathLike[str]


def expand_home(given: _Given) -> _Given:
    """Replace a leading `~` or `~user` as a shell does, unless a path of that name exists."""
    text = os.fspath(given)
    if not text.startswith("~") or os.path.lexists(text):
        return given
    expanded = os.path.expanduser(text)
    return expanded if isinstance(given, str) else Path(expanded)


def not_found(given: _Given, reason: str) -> SourceNotFound:
    """Return the error for a source that is nowhere, with the nearest path that exists."""
    near = nearest_path(given)
    return SourceNotFound(given, f"{reason}; did you mean {near}?" if near else reason)


def nearest_path(given: _Given) -> Path | None:
    """Return the existing path most like one that does not exist; None if none is like it.

    It is a neighbour of the first directory, or file, on the way that does not exist.
    """
    missing = Path(given)
    rest = Path()
    try:
        while not os.path.lexists(missing.parent):
            rest = missing.name / rest
            missing = missing.parent
        name = nearest_name(missing.name, sorted(os.listdir(missing.parent)))
    except (OSError, ValueError):  # it may not be listed, or no file can have this name
        return None
    if name is None:
        return None
    near = missing.parent / name
    return near / rest if os.path.lexists(near / rest) else near
