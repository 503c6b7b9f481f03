"""`shmload run --redirect`: `redirect` is on in a program before its first line.

An ordinary Python is told by two variables, which the processes that the program starts inherit; in
a copy of a template it is turned on by hand.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

VARIABLE = "SHMLOAD_REDIRECT"
_PATH = "PYTHONPATH"
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")


def variables(way: str, environment: "Mapping[str, str]") -> dict[str, str]:
    """Return the variables to set in an environment.

    Args:
        way: `1`, or `verbose` to have each call's way written on standard error; empty for none.
        environment: as it is.
    """
    if not way:
        return {}
    before = environment.get(_PATH)
    return {VARIABLE: way, _PATH: f"{_FOLDER}{os.pathsep}{before}" if before else _FOLDER}


def without_redirect(environment: "Mapping[str, str]") -> dict[str, str]:
    """Return an environment without what `variables` has set in it."""
    found = {name: value for name, value in environment.items() if name != VARIABLE}
    entries = found.get(_PATH, "").split(os.pathsep)
    if _FOLDER in entries:
        del found[_PATH]
        if rest := [entry for entry in entries if entry != _FOLDER]:
            found[_PATH] = os.pathsep.join(rest)
    return found


def begin(way: str, modules: "Mapping[str, ModuleType]") -> None:
    """Turn `redirect` on in this process, as an ordinary Python does when it starts.

    Args:
        way: as for `variables`.
        modules: imported ones that are not in `sys.modules`.
    """
    try:
        from shmload.integrations.redirect import begin as turn_on

        turn_on(modules, verbose=way == "verbose")
    except Exception as exc:  # the caller counts on the program by now
        print(f"shmload run: --redirect is off: {exc}", file=sys.stderr)
