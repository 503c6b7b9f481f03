"""What makes two programs need different templates: their interpreter, variables and standing.

A template serves a program only if everything in `key_of` is the same for both. A copy of a
template inherits it, so nothing of it is taken over.
"""

import os
import resource
import select
import sys

from shmload import __version__
from shmload._templates import place
from shmload._templates.messages import VERSION
from shmload._templates.variables import read_on_import

# What a process may do, of /proc/PID/status and /proc/PID/ns.
_FIELDS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
           "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass",
           "SpeculationIndirectBranch", "THP_enabled")  # fmt: skip
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "pid_for_children", "time",
               "time_for_children", "user", "uts")  # fmt: skip
# Restrictions that say how many they are, but not which; see `_are_of_the_container`.
_NUMBERS = ("NoNewPrivs", "Seccomp", "Seccomp_filters")
_LIMITS = sorted({getattr(resource, name) for name in vars(resource) if name.startswith("RLIMIT_")})
# All of these as this interpreter was started: a program may change them before it needs a key.
_INTERPRETER = repr((
    (sys.executable, sys.prefix, sys.version, sys.path[0 if sys.flags.safe_path else 1 :]),
    (tuple(sys.flags), sorted(sys._xoptions.items()), sys.warnoptions),
    getattr(sys.stdout, "write_through", None),  # unbuffered: no flag says so
))  # fmt: skip
FLAGS = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
"""The options of this interpreter, as they were given, without `-m` or `-c`."""
_LAST = "".join(FLAGS[-1:])
if _LAST.startswith("-") and _LAST.endswith(("m", "c")) and not {*_LAST} & {"W", "X"}:
    FLAGS[-1:] = [_LAST[:-1]] if len(_LAST) > 2 else []  # `-Im` is `-I -m`


def key_of(environment: dict[str, str]) -> str:
    """Return the key of the template for this process's programs.

    Args:
        environment: the variables that imports shall find.
    """
    session, terminal = session_and_terminal()
    facts = (
        (__version__, VERSION),
        _INTERPRETER,
        sorted(read_on_import(environment).items()),
        (sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), os.nice(0)),
        os.sched_getparam(0).sched_priority,
        list(map(resource.getrlimit, _LIMITS)),
        [said_of("self", what) for what in ("cgroup", "oom_score_adj")],
        rights_of(),
        session if terminal else None,
    )
    return place.key_of(repr(facts))


def session_and_terminal() -> tuple[int, int]:
    """Return this process's session, and its controlling terminal's number; 0 for none."""
    with open("/proc/self/stat", "rb", buffering=0) as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[3]), int(fields[4])


# Of any process ---------------------------------------------------------------------------------


def rights_of(pid: int | str = "self") -> dict[str, object]:
    """Return what a process may do, as named values that two processes can be compared by.

    Args:
        pid: its process id, or "self".

    Raises:
        OSError: it has ended, or this process may not look at it.
    """
    status = read_status(pid)
    found: dict[str, object] = {field: status.get(field) for field in _FIELDS}
    for name in _NAMESPACES:
        try:
            found[name] = os.readlink(f"/proc/{pid}/ns/{name}")
        except FileNotFoundError:  # a kernel without it; a process that has ended fails above
            continue
    root = os.stat(f"/proc/{pid}/root")
    found["root directory"] = (root.st_dev, root.st_ino)
    found["label"] = said_of(pid, "attr/current")
    found["audit user"] = said_of(pid, "loginuid")
    return found


def how_it_differs(pid: int, pidfd: int, own: dict[str, object]) -> str:
    """Say why a process may not do what this process may do, and no less; empty if it may.

    A process that one has confined under the same user id must not get a template that may do
    more. Its own word counts for nothing: what the kernel says of it is compared.

    Args:
        pid: its process id.
        pidfd: holds it.
        own: what this process may do.
    """
    try:
        found = rights_of(pid)
    except OSError as exc:
        return f"what it may do cannot be read: {exc}"
    if has_ended(pidfd):  # what was read may be of another process with its number
        return "it has ended"
    for name, wanted in own.items():
        if found.get(name) != wanted:
            return f"it differs from the template in {name}"
    if not _are_of_the_container(found):
        return "it has a filter of system calls of its own, or no_new_privs"
    return ""


def _are_of_the_container(found: dict[str, object]) -> bool:
    """Tell whether restrictions that cannot be told apart are those of all processes here.

    Two filters of system calls cannot be compared, only counted; Landlock shows in no_new_privs
    only. If the first process has as many, they are the container's.
    """
    own = [found[name] for name in _NUMBERS]
    if own in (["0", "0", "0"], ["0", "0", None]):
        return True
    try:
        first = read_status(1)
    except OSError:
        return False
    return own == [first.get(name) for name in _NUMBERS]


def read_status(pid: int | str = "self") -> dict[str, str]:
    """Return what the kernel says of a process, from /proc/PID/status.

    Raises:
        OSError: it has ended.
    """
    with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        text = file.read().decode("latin-1")
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, by a signal or a debugger."""
    try:
        return read_status(pid)["State"].startswith(("T", "t"))
    except OSError:
        return False


def has_ended(pidfd: int) -> bool:
    """Tell whether a process has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


def said_of(pid: int | str, name: str) -> str | None:
    """Return what the kernel says of a process in a file of /proc; None if it says nothing."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read().decode("utf-8", "surrogateescape")
    except OSError:  # it has ended, or this kernel or its security module does not say it
        return None
