"""What makes two programs need different templates.

A template serves a program only if everything here is the same for both: the interpreter and its
flags, the packages, the variables that libraries read on import, the cores, and what the kernel
lets the process do. The template itself compares the rest.
"""

import os
import resource
import sys

from shmload._templates import cgroups, inherited, place, rights
from shmload._templates.messages import VERSION
from shmload._templates.variables import first_environment, read_on_import
from shmload._version import __version__


def key_of_this_process(name: str) -> str:
    """Return the key of the template of a name for this process's programs."""
    return place.key_of(facts_of_this_process(name))


def facts_of_this_process(name: str, environment: "dict[str, str] | None" = None) -> str:
    """Return everything that a template for this process's program must have in common with it.

    Args:
        name: of the template, as the user gave it.
        environment: the variables that imports shall find; None for this process's first ones.
    """
    session, terminal = session_and_terminal()
    return repr(
        (
            (__version__, VERSION, name),
            _interpreter(),
            sorted(read_on_import(environment or first_environment()).items()),
            # Libraries choose the size of their thread pools when they are loaded.
            sorted(os.sched_getaffinity(0)),
            # Of the first thread the kernel sets it up at exec, and never again.
            resource.getrlimit(resource.RLIMIT_STACK),
            sorted(inherited.said_of_this_process().items()),
            None if cgroups.can_enter_cgroup() else rights.said_of("self", "cgroup"),
            rights.rights_of(),
            session if terminal else None,
        )
    )


def _interpreter() -> tuple[object, ...]:
    """Return what this interpreter is, with its flags and packages."""
    entries = sys.path if sys.flags.safe_path else sys.path[1:]
    return (
        (sys.executable, sys.prefix, sys.version),
        (tuple(sys.flags), sorted(sys._xoptions.items()), sys.warnoptions, _is_unbuffered()),
        [(entry, _installed(entry)) for entry in entries],
    )


def _is_unbuffered() -> bool | None:
    """Tell whether Python was started with -u, which no flag says."""
    return getattr(sys.stdout, "write_through", None)


def session_and_terminal() -> tuple[int, int]:
    """Return this process's session, and its controlling terminal's number; 0 for none."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[3]), int(fields[4])


def _installed(folder: str) -> int | None:
    """Return when packages were last installed in a directory of them; None for another one.

    A template looks by itself whether the files that it has imported are unchanged.
    """
    if not folder.endswith(("site-packages", "dist-packages")):
        return None
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None
